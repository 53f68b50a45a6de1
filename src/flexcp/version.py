"""The version of flexcp, in a module of its own so that release tools and every module can read it."""

__version__ = "0.2.0"
