"""Figures from rewards, and how sure they are. Pure: numbers in, numbers out; scipy does the statistics.

Contract: rewards come by task, graded attempts only. A task is the unit that was drawn: attempts at one task are not
independent of each other, so every interval is over tasks.
"""
