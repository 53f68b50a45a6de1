"""What ranks send each other: messages of attention with their buffers, collectives outside attention, and short notes.

The notes (plan hashes, host names, failures) go through the key-value store of the process group.
"""
