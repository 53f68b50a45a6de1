"""The commands of ``flexcp``, one module each."""
