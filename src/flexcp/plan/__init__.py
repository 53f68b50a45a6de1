"""The plan as data: placement, programs, rounds, memory, its check, its file and its text."""
