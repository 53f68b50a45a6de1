"""Training with flexcp: the loop of ``flexcp train``, a small GPT, and the demo."""
