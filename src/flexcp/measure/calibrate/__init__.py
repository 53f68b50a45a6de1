"""Fitting a cost model to this machine."""
