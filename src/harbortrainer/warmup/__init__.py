"""The warm-up: a policy that solves some of the tasks, some of the time, before reinforcement learning starts.

Importing this package is light (the run file's reader does); torch comes with the first call.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.warmup.config import WarmupConfig

if TYPE_CHECKING:
    from harbortrainer.runs.display import Display

__all__ = ["WarmupConfig", "warm_up"]


def warm_up(config: WarmupConfig, out_dir: Path, *, seed: int = 0, display: "Display | None" = None) -> Path:
    """Make the policy; see `harbortrainer.warmup.warmup.warm_up`."""
    # Harbor imports LiteLLM, which would look for a price list on the network first.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from harbortrainer.warmup.warmup import warm_up as run

    return run(config, out_dir, seed=seed, display=display)
