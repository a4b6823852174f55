"""The worker side of the queue protocol."""
