"""`gpmil bench`: how fast and how large, as ratios to a naive twin in the same run.

cases.py       what is measured, one function a case
naive.py       the paper's algorithm bag by bag with explicit inverses: what ratios refer to
engine.py      the only place that reaches into the package's inference
cohorts.py     cohorts of every size, drawn quickly
bandwidth.py   how fast this machine reads memory: the floor under a sweep
measure.py     seconds, threads, peak memory in a process of its own (child.py)
bars.py        what each case is meant to meet
scaling.py     cost against N, M, bag size and coupling
page.py        lines, tables, JSON and the picture
"""
