"""One rank's program, derived from the plan, and the loop that runs it."""
