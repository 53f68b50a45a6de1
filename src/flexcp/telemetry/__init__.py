"""Telemetry: records of what a rank did and when, and dumps for when something goes wrong.

It is off unless a :class:`flexcp.Telemetry` is passed to ``bind``.
"""
