"""Run a warm-up: from a `[warmup]` table to a model folder in transformers' format, which is written atomically.

`warmup.family` names a Python file beside a set of tasks that makes a policy for them.
"""

import asyncio
import importlib.util
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from transformers.utils import logging as transformers_logging

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.replay import replay
from harbortrainer.warmup.supervised import BasePolicy, SupervisedTrainer, load_policy
from harbortrainer.warmup.tasks_with_solution import tasks_with_solution
from harbortrainer.warmup.trial_sequences import encoded_trials, model_for


class TaskGenerator(Protocol):
    """Interface of the Python file that `warmup.family` names."""

    def make_policy(self, config: WarmupConfig, folder: Path, *, seed: int, display: Display) -> None:
        """Write a policy that solves `config.success` of the tasks to `folder`: weights, tokenizer, chat template."""
        ...


def load_task_generator(file: Path) -> TaskGenerator:
    """Import the file as a script, so that it can import the modules beside it, now and later.

    Raises:
        UserError: The file does not exist, or defines no `make_policy()`.
    """
    if not file.is_file():
        raise UserError("no such file", where=str(file), do="set warmup.family to a Python file with make_policy()")
    name = f"harbortrainer_family_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    if not hasattr(module, "make_policy"):
        do = "define make_policy(), as datasets/quickstart/make_tasks.py does for its variants()"
        raise UserError("defines no make_policy()", where=str(file), do=do)
    return cast(TaskGenerator, module)


def warm_up(config: WarmupConfig, out_dir: Path, *, seed: int = 0, display: Display | None = None) -> Path:
    """Make a policy, save it to `out_dir`, and return `out_dir`.

    With `family`, the family's file makes the policy. With `tasks`, the model is trained on replayed solutions for
    `config.steps` steps; with `run`, on that run's good trials. These two guarantee no success rate.

    Raises:
        UserError: A file, folder or model is missing or invalid, or the family's success rate was not reached.
    """
    if not torch.cuda.is_available():
        # The other cores import the environment's workers meanwhile; spinning threads would slow that down.
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # it would overwrite the run's bars
    display = display or Display()
    with atomic_folder(out_dir) as folder:
        if config.run is not None:
            _learn_trials(config, config.run, folder, seed, display)
        elif config.family is not None:
            load_task_generator(config.family).make_policy(config, folder, seed=seed, display=display)
        else:
            _learn_tasks(config, folder, seed, display)
    return out_dir


def _learn_tasks(config: WarmupConfig, folder: Path, seed: int, display: Display) -> None:
    assert config.tasks is not None and config.model is not None
    tasks = tasks_with_solution(config.tasks, display.line)
    start = load_policy(config.model)
    found = _replay_solutions(tasks, config, folder, display)
    sequences = [sequence for episode in found for sequence in start.encode(episode)]
    _learn(f"{len(found)} of {len(tasks)} solutions", start, sequences, config, folder, seed, display)


def _learn_trials(config: WarmupConfig, run: Path, folder: Path, seed: int, display: Display) -> None:
    model = model_for(run, config.model)
    left_out: Counter[str] = Counter()
    sequences = encoded_trials(run, min_reward=config.min_reward, left_out=left_out)
    for reason, count in left_out.most_common():
        display.line(f"warm-up: skipped trials: {count} {reason}")
    _learn(f"{len(sequences)} good conversations", load_policy(model), sequences, config, folder, seed, display)


def _learn(
    what: str,
    start: BasePolicy,
    sequences: Sequence[Encoded],
    config: WarmupConfig,
    folder: Path,
    seed: int,
    display: Display,
) -> None:
    trainer = SupervisedTrainer(start, lr=config.lr, lora_rank=config.lora_rank)
    rng = random.Random(seed)
    with display.bar("warm-up: supervised steps", config.steps) as bar:
        for step in range(config.steps):
            loss = trainer.step(rng.choices(sequences, k=config.batch_size), scale=1 - step / config.steps)
            bar.advance()
    display.line(f"warm-up: {what}, {config.steps} steps, loss {loss:.3f}")
    trainer.save(folder)


def _replay_solutions(
    tasks: Sequence[TaskRef], config: WarmupConfig, folder: Path, display: Display
) -> list[Demonstration]:
    with display.bar("warm-up: replaying solutions", len(tasks)) as bar:
        playing = replay(
            tasks,
            environment_type=config.environment_type,
            environment_kwargs=config.environment_kwargs,
            trusted=config.trusted_tasks,
            work_dir=folder,
            report=bar.advance,
        )
        found = asyncio.run(playing)
    if not found:
        raise UserError(
            "no solution reaches the top reward when it is typed into a terminal",
            where=str(config.tasks),
            do="run `harbortrainer tasks check` on this folder",
        )
    return found
