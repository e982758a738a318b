"""`[warmup]`: ours alone, for the embedded engine; Prime-RL never sees it.

The fields are what `harbortrainer.warmup` needs to make a small policy that succeeds now and then.
"""

from pydantic import ConfigDict

from harbortrainer.config.base import Table


class WarmupConfig(Table):
    """`[warmup]`: make the policy before the run, when its folder is not there yet."""

    model_config = ConfigDict(extra="allow")
