"""Checks before a run: what it needs on this machine, each green, yellow or red, each with file, key and remedy.

Contract: a check looks and changes nothing; none takes more than a few seconds; cheap ones come first, and nothing slow
is imported before they passed; a secret's value is never shown. What a run file says is read from the validated run.
"""
