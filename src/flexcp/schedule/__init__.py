"""The scheduler: turns a placement (which rank keeps and computes what) into a plan, and predicts how long it takes."""
