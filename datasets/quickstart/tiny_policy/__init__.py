"""The quickstart's tiny policy: architecture, tokenizer, curriculum, and measurement in real trials.

`make_tasks.py`, the family that a run file's `[warmup]` names, loads this package from its own folder. To warm up a
policy on your own family of tasks, copy the folder and write other `variants()`.
"""
