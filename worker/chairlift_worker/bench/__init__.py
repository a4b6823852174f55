"""`chairlift bench`: what the service costs and how fast it is, measured."""
