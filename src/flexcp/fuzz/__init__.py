"""The fuzzer: draws random cases, plans them, and checks the plans against independent references.

A case is a batch of documents with masks, a cluster, an attention shape and the planner's options. Each plan is
executed symbolically, simulated, and saved and read back. Some are also shown in a report or run on real ranks, and
some cases go through a data loader.

mask_words.py       masks as lists of plain values, and the (query, key) pairs that each allows by definition
cases.py            a case as plain values, and the file that stores it
draw_masks.py       random masks
draw.py             random cases
token_machine.py    executes a plan token by token on integers
dense_attention.py  dense attention and its gradients in float64
plan_checks.py      checks of a plan: masks, limits, execution by tokens, simulated times and file
report_check.py     check of a plan's HTML report
loader_check.py     check of a data loader over a case's documents
rank_check.py       check of a plan on real ranks, against dense attention
judge.py            runs all checks on one case
shrink.py           makes a failing case smaller
findings.py         the results of a campaign: what it covered, and which cases failed
worker.py           a process that receives case numbers, and draws and checks these cases
campaign.py         checks many cases on many workers
readers.py          corrupts files of every kind that a user can pass, and checks that each is read or refused cleanly
"""
