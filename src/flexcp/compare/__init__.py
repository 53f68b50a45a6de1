"""Strategies beside each other: simulated times, advice, and the forms of latent attention."""
