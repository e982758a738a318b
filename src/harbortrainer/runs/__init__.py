"""The run folder: what a run writes, how it survives a kill, and what is shown at its end.

Invariant: everything in a run folder is either written whole (a temporary file, fsync, rename) or appended line
by line, so that a reader sees a prefix of the truth at any moment and `--resume` never meets half a file.
"""
