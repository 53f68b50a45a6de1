"""Telemetry: what a rank did, when, and what it held when something went wrong.
Off unless a :class:`flexcp.Telemetry` is bound.
"""
