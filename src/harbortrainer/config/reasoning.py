"""Models that think before they answer and for which Prime-RL at the pin finds no reasoning parser by their name."""

import re

UNTOLD = re.compile(r"Qwen/Qwen3-[\d.]+B(-A[\d.]+B)?(-FP8|-AWQ)?")
"""Qwen3's own hybrids; those named Instruct do not think, and Prime-RL knows those named Thinking."""


def thinks_untold(model: str) -> bool:
    """Whether `[inference.vllm] reasoning_parser` has to be set for a model of the hub."""
    return UNTOLD.fullmatch(model) is not None
