"""The fuzzer: random cases through plan, symbolic execution, simulator, file, report, loader and real ranks, beside
references of its own.

mask_words.py       masks as plain values, and which pairs each allows by definition
cases.py            a case as plain values, in a file and back
draw_masks.py       random masks
draw.py             random cases
token_machine.py    a plan executed token by token on integers
dense_attention.py  attention and its gradients, dense, in float64
plan_checks.py      what is asked of every plan
report_check.py     what is asked of its report
loader_check.py     what is asked of a loader over its documents
rank_check.py       what is asked of real ranks
judge.py            one case through all of them
shrink.py           a failing case made small
findings.py         what a campaign did, and which cases failed
worker.py           a process that judges cases by their numbers
campaign.py         many cases on many workers
readers.py          changed files of every kind that a user can hand over
"""
