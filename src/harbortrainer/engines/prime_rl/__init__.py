"""The engine that scales: Prime-RL's own `rl`, checked before, launched, watched and cleaned up after.

Prime-RL is never patched and never reimplemented; nothing here imports it.
"""
