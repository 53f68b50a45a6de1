"""Plans as data: placement, programs, rounds and memory; checking a plan, saving it to a file, printing it."""
