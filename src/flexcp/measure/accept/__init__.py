"""The first run on a cluster: what flexcp takes for granted of it, checked on all its ranks."""
