"""Training with flexcp: a small GPT and the demo."""
