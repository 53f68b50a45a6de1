"""What one rank does with a plan: its program, derived from the plan, and the loop that runs it."""
