"""Exports of a run: the trained model, and the good trials as a dataset for supervised fine-tuning.

Invariants: an export is written atomically. It contains no local path and no secret of the config. Its weights are the
trained ones, at most rounded to the base model's dtype.
"""
