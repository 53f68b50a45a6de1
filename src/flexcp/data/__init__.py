"""Data: where lengths come from."""
