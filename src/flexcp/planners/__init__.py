"""The planners: a strategy is a named function from a request to a placement."""
