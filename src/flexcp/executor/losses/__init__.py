"""Losses over ranks: who divides and reduces them, labels that are checked,
and the edges and log-probabilities of trees.
"""
