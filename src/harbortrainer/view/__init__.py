"""Local web dashboard for run folders and evaluations.

Contract: the index is the only file written into the folder. No request leaves the machine. Model output reaches a page
as text only.
"""
