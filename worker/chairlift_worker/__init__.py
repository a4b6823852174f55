"""The Chairlift worker: queue intake, engine, publisher."""
