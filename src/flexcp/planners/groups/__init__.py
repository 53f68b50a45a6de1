"""The strategy ``groups``: each document on a group of ranks of its own size."""
