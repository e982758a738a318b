"""Local pages over run folders and evaluations: rendered here, shown by a browser, changed by nobody.

Contract: nothing is written into the folder that is looked at but its index, no request leaves the machine, and what a
model wrote reaches a page as text only.
"""
