"""Known errors: how far simulated and modelled times were from what they stand for.

errors.json   the errors, written by the commands that compare (``make box``, ``make published``, ``make kernel-fit``),
              never by hand
entries.py    which entries there can be, and what each holds; what has not been run has none
words.py      which entry applies to a predicted time, in the words that stand beside it

docs/results/errors.md is the same as a page.
"""
