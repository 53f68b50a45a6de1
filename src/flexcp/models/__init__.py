"""Models: the sizes that planning and simulation need, by name, from a ``config.json`` or from numbers."""
