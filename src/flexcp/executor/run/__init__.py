"""One rank's program and the loop that runs it."""
