"""The planners: each strategy (``auto``, ``zigzag``, ``blocks``, ...) is a function from a request to a placement."""
