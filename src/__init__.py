"""Lets `python -m src.train` run from a checkout; nothing else."""
