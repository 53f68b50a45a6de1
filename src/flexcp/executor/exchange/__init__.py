"""What ranks send each other: the messages of a pass with their buffers, collectives outside attention, and what they
tell each other through the group's store.
"""
