"""The quickstart's tiny policy: its architecture, its tokenizer, its curriculum and its exam.

`make_tasks.py`, the family that a run file's `[warmup]` names, loads this package from beside it. To warm a policy up
on a family of your own, copy the folder and write other `variants()`.
"""
