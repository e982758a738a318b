"""The warm-up: supervised fine-tuning before reinforcement learning, for a policy that solves some of the tasks.

Importing the package is cheap; `warmup.warmup` imports torch and harbor.
"""

from harbortrainer.harbor_compat import keep_litellm_offline

keep_litellm_offline()
