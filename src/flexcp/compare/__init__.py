"""Comparisons of strategies by simulated time, advice on changing the strategy, and the forms of latent attention."""
