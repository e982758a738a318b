"""The Prime-RL engine: checks, launches and watches Prime-RL's own `rl`, and cleans up after it.

Prime-RL is never patched and never reimplemented; nothing here imports it.
"""
