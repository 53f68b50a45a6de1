"""Strategies: named planners. A strategy is a function from a request to a placement."""
