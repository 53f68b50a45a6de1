"""The fuzzer: random cases run through plan, symbolic execution, simulator, file, report, loader and real ranks,
and compared with independent references.

mask_words.py       masks as plain values, and which pairs each allows by definition
cases.py            a case as plain values, and its file
draw_masks.py       random masks
draw.py             random cases
token_machine.py    a plan executed token by token on integers
dense_attention.py  attention and its gradients, dense, in float64
plan_checks.py      the checks of every plan
report_check.py     the check of its report
loader_check.py     the check of a loader over the case's documents
rank_check.py       the check on real ranks
judge.py            all checks of one case
shrink.py           making a failing case smaller
findings.py         the results of a campaign: what it covered, and which cases failed
worker.py           a process that judges cases by their numbers
campaign.py         many cases on many workers
readers.py          randomly changed files of every kind that a user can pass
"""
