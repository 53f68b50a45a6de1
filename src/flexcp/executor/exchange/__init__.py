"""What ranks send each other: messages of a pass, agreement through the store, buffers."""
