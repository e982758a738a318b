"""Asks other programs, without trusting that they are there."""

import subprocess


def output_of(*words: str, timeout_s: float = 20.0) -> str | None:
    """What a program says on stdout; None when it is not there, takes too long or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
