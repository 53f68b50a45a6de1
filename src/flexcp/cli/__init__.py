"""The command ``flexcp``: thin commands over the library, one file each."""
