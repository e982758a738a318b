"""Reinforcement learning for language-model agents on Harbor tasks."""

__version__ = "0.2.0"
