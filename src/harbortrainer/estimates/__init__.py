"""Statistics of rewards: means, pass@k, paired differences, with confidence intervals. Pure functions on scipy.

Invariants: rewards are grouped by task and hold graded attempts only. The task is the sampling unit: attempts at one
task are not independent, so every interval is over tasks.
"""
