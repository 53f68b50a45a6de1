"""The strategy ``groups``: each document is placed on a group of ranks whose size it needs."""
