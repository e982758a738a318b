"""The warm-up: a policy that solves some of the tasks, some of the time, before reinforcement learning starts.

Importing the package is light; `warmup.warmup` brings torch and harbor.
"""

from harbortrainer.harbor_side import keep_litellm_offline

keep_litellm_offline()
