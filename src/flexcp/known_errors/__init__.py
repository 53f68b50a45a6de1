"""Known errors of simulated and modelled times, compared with measured or published ones.

errors.json   the errors, written by the commands that compare (``make box``, ``make published``, ``make kernel-fit``),
              never by hand
entries.py    the possible entries of errors.json and what each holds; a comparison that has not been run has none
words.py      which entry applies to a predicted time, and its words in messages and reports

docs/results/errors.md shows the same entries as a page.
"""
