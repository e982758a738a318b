"""Checks of a run file and this machine before a run. Each finding is green, yellow or red, with key and remedy.

Invariants: a check changes nothing and takes at most a few seconds. Cheap checks run first, before slow packages are
imported. The value of a secret is never printed. Checks read the validated run, not the file's text.
"""
