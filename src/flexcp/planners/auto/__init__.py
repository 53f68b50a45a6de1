"""auto: the fastest of many placements, by the event simulator."""
