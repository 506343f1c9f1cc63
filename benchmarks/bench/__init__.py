"""`gpmil bench`: how fast and how large, as ratios to a naive twin in the same run.

command.py     options; `gpmil bench` of a clone comes here
cases.py       what is measured, one function per case
naive.py       the paper's algorithm bag by bag with explicit inverses: what ratios refer to
engine.py      the only place that reaches into the package's inference
cohorts.py     cohorts of every size, drawn quickly
bandwidth.py   how fast this machine reads memory: the floor under a sweep
measure.py     seconds, threads, peak memory in a process of its own (child.py)
results.py     what a case found, and the bars it is meant to meet
scaling.py     cost against N, M, bag size and coupling
machine.py     what the numbers were measured on
page.py        lines, tables, JSON and the picture
"""
