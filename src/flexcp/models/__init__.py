"""Models by name, by ``config.json`` or by numbers, as far as planning and simulation need them."""
