"""The strategy ``auto``: it takes the fastest of many placements, by the event simulator."""
