"""Losses over ranks: check how a loss is divided and its gradients are reduced, check labels, and compute the losses
and log-probabilities of trees.
"""
