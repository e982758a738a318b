"""Evaluation of a policy on a task set, its report, and the comparison of two evaluations.

Contract: a trial counts as soon as its row is on disk. An infrastructure failure is never a reward of 0.
"""
