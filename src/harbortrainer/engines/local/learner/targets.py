"""Which layers of a model get a LoRA."""

import re
from collections.abc import Iterable

from torch import nn

from harbortrainer.errors import UserError


def target_modules(base: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The linear layers to adapt, found as Prime-RL finds them (src/prime_rl/trainer/lora.py, 559b44772).

    A plain name matches any part of a layer's path, a pattern with special characters is searched in the path.
    Answers with last names (`q_proj`) when they describe the layers completely, with full paths otherwise.

    Raises:
        UserError: No linear layer matches.
    """
    patterns = list(patterns)
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    chosen = {name for name in linear if any(_matches(name, p) for p in patterns)}
    if not chosen:
        raise UserError(
            "no linear layer of the model has such a name",
            where="trainer.model.lora.target_modules",
            do=f"name some of {', '.join(sorted({_last(name) for name in linear}))}",
        )
    last_names = {_last(name) for name in chosen}
    described = {name for name in linear if _last(name) in last_names}
    return sorted(last_names if described == chosen else chosen)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _matches(name: str, pattern: str) -> bool:
    if re.search(r"[.*+?^$\[\]{}|()\\]", pattern):
        return re.search(pattern, name) is not None
    return pattern in name.split(".")
