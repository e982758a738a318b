"""Checks before a run: what it needs on this machine, each green, yellow or red, each red with what to do.

Contract: a check looks and changes nothing; none takes more than a few seconds; a secret's value is never shown.
"""
