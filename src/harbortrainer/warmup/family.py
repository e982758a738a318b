"""The file that `warmup.family` names: Python beside its tasks, which makes a policy for them."""

import importlib.util
import sys
from pathlib import Path
from typing import Protocol, cast

from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display


class Family(Protocol):
    """What a family's file has to define."""

    def make_policy(self, config: WarmupConfig, folder: Path, *, seed: int, display: Display) -> None:
        """Write a policy that solves `config.success` of the tasks to `folder`: weights, tokenizer, chat template."""
        ...


def load_family(file: Path) -> Family:
    """Run the file as Python runs a script: what lies beside it can be imported, now and later.

    Raises:
        UserError: No such file, or it makes no policy.
    """
    if not file.is_file():
        raise UserError("no such file", where=str(file), do="point warmup.family at a Python file with make_policy()")
    name = f"harbortrainer_family_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    if not hasattr(module, "make_policy"):
        do = "define make_policy(), as datasets/quickstart/make_tasks.py does for its variants()"
        raise UserError("no make_policy() in it", where=str(file), do=do)
    return cast(Family, module)
