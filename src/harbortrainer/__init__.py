"""Reinforcement learning for language-model agents on Harbor tasks."""

__version__ = "0.1.0"
