"""Comparisons of strategies by simulated time, advice on whether to change strategy,
and the forms of latent attention.
"""
