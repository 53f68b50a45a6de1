"""The scheduler: it turns a placement into a plan, and predicts in closed form how long a placement takes."""
