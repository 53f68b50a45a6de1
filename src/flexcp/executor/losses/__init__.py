"""Losses over ranks.

These modules check how a loss is divided and how its gradients are reduced, check labels, and compute the losses and
log-probabilities of trees.
"""
