"""`chairlift demo`."""
