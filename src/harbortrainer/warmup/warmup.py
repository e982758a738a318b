"""From `[warmup]` to a folder with a warmed-up policy: weights, tokenizer and chat template, in transformers' format.

Invariant: the folder appears whole or not at all.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.family import load_family
from harbortrainer.warmup.good_examples import encoded_trials, model_for
from harbortrainer.warmup.replay import replay
from harbortrainer.warmup.solved_tasks import solved_tasks
from harbortrainer.warmup.starting_policy import StartingPolicy, load_policy
from harbortrainer.warmup.supervised import SupervisedTrainer


def warm_up(config: WarmupConfig, out_dir: Path, *, seed: int = 0, display: Display | None = None) -> Path:
    """Make a policy and save it to `out_dir`, which it returns.

    With `family` the policy is what the family's file makes of the config. With `tasks` it has seen the replayed
    solutions for `config.steps` steps, with `run` that run's good trials, and nothing is promised.

    Raises:
        UserError: A file, folder or model is not what it should be, or the family's success could not be reached.
    """
    if not torch.cuda.is_available():
        # The other cores import the environment's workers meanwhile; spinning threads would take them away.
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # it would draw over the run's own bars
    display = display or Display()
    with atomic_folder(out_dir) as folder:
        if config.run is not None:
            _learn_trials(config, config.run, folder, seed, display)
        elif config.family is not None:
            load_family(config.family).make_policy(config, folder, seed=seed, display=display)
        else:
            _learn_tasks(config, folder, seed, display)
    return out_dir


def _learn_tasks(config: WarmupConfig, folder: Path, seed: int, display: Display) -> None:
    assert config.tasks is not None and config.model is not None
    tasks = solved_tasks(config.tasks, display.line)
    start = load_policy(config.model)
    found = _replayed(tasks, config, folder, display)
    sequences = [sequence for episode in found for sequence in start.encode(episode)]
    _learn(f"{len(found)} of {len(tasks)} solutions", start, sequences, config, folder, seed, display)


def _learn_trials(config: WarmupConfig, run: Path, folder: Path, seed: int, display: Display) -> None:
    model = model_for(run, config.model)
    left_out: Counter[str] = Counter()
    sequences = encoded_trials(run, min_reward=config.min_reward, left_out=left_out)
    for why, count in left_out.most_common():
        display.line(f"warm-up: left out: {count} {why}")
    _learn(f"{len(sequences)} good conversations", load_policy(model), sequences, config, folder, seed, display)


def _learn(
    what: str,
    start: StartingPolicy,
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


def _replayed(tasks: Sequence[TaskRef], config: WarmupConfig, folder: Path, display: Display) -> list[Demonstration]:
    with display.bar("warm-up: replaying solutions", len(tasks)) as bar:
        kind, kwargs = config.environment_type, config.environment_kwargs
        playing = replay(tasks, environment_type=kind, environment_kwargs=kwargs, work_dir=folder, report=bar.advance)
        found = asyncio.run(playing)
    if not found:
        raise UserError(
            "no solution reaches the top reward when it is typed into a terminal",
            where=str(config.tasks),
            do="run `harbortrainer tasks check` on it",
        )
    return found
