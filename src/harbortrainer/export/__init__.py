"""What comes out of a run: the trained policy as others load it, and the good trials as others train on them.

Invariants: an export appears whole or not at all; nothing in it names a path of this machine or holds a secret of the
config; its weights are byte for byte the numbers that the run trained, rounded at most to the base model's own dtype.
"""
