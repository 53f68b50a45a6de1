"""The strategy ``groups``: each document is placed on a group of ranks, as large as the document needs."""
