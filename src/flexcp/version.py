"""The version, which release tools read here and every room may name."""

__version__ = "0.1.0"
