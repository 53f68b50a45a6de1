"""A cost model fitted on this machine."""
