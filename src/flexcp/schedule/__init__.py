"""From a placement to a plan, and how long a placement takes in closed form."""
