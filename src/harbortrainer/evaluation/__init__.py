"""Playing a task set with any policy, the report on what came of it, and the comparison of two evaluations.

Contract: a trial counts as soon as its line is on disk; a failure of the infrastructure is never a reward of 0.
"""
