"""Measurements on real ranks: verification, benchmarks, calibration, replay, and the first run on a cluster."""
