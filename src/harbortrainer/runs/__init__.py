"""The run folder: its files, durable writes, checkpoints, and the summary of a run.

Invariant: a file in a run folder is replaced atomically (temporary file, fsync, rename) or appended line by line. So a
reader always sees a valid prefix, and `--resume` never finds half a file.
"""
