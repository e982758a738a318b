"""The config schema of the pinned Prime-RL."""

from harbortrainer.engines.prime_rl import checkout

SCHEMA = checkout.find().root / "packages" / "prime-rl-configs" / "src"
"""Folder from which `prime_rl.configs` can be imported without torch or vLLM."""
