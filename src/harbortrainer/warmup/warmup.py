"""Run a warm-up: from a `[warmup]` table to a model folder in transformers' format, which is written atomically.

`warmup.family` names a Python file beside a set of tasks that makes a policy for them.
"""

import asyncio
import importlib.util
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Protocol, cast

import torch
from transformers.utils import logging as transformers_logging

from harbortrainer.config.agent_table import PLAIN_AGENT
from harbortrainer.config.prime_rl_run import plugin_envs
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import lookup
from harbortrainer.config.trusted_tasks import is_trusted
from harbortrainer.environment.renderers_compat import with_chat_format
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display, name_first, plural
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.runs.memory import release_freed_memory
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.trials.plain_format import SYSTEM_PROMPT
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.replay import replay
from harbortrainer.warmup.sampled_trials import measure_rewards
from harbortrainer.warmup.supervised import BasePolicy, SupervisedTrainer, load_policy
from harbortrainer.warmup.tasks_with_solution import TRAINING_TASKS, tasks_with_solution, with_solution
from harbortrainer.warmup.trial_sequences import encoded_trials, model_for

_STEPS_BETWEEN = 5
"""Supervised steps between two measurements."""


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


@dataclass(frozen=True)
class Rollouts:
    """What the warm-up takes from the run that follows.

    Attributes:
        renderer: The table `[orchestrator.renderer]`; None for the model's own format.
        max_length: Most tokens of a trial.
        answer_length: Most tokens of an answer; None if only `max_length` limits it.
        temperature: Sampling temperature, where a trial is played to measure a reward.
        max_turns: Most turns of a trial; None if the run sets no limit.
        timeout_multiplier: Factor on the tasks' time limits, where a trial is played to measure a reward.
        training_tasks: The tasks that the run trains on, if `[warmup]` names nothing else to learn from.
    """

    renderer: Mapping[str, object] | None = None
    max_length: int = 2048
    answer_length: int | None = None
    temperature: float = 1.0
    max_turns: int | None = None
    timeout_multiplier: float = 1.0
    training_tasks: Sequence[TaskRef] = ()


def rollouts_of(run: RunConfig) -> Rollouts:
    """Return what the warm-up takes from a run file.

    Raises:
        UserError: The warm-up learns from the training tasks, and they cannot be read.
    """
    env = run.orchestrator.train.source[0].env
    own_tasks = run.warmup is not None and run.warmup.learns_solutions and run.warmup.tasks is None
    return Rollouts(
        renderer=with_chat_format(run).orchestrator.renderer,
        max_length=run.seq_len,
        answer_length=run.orchestrator.train.sampling.max_completion_tokens,
        temperature=run.orchestrator.train.sampling.temperature,
        max_turns=lookup(env, "agent.max_turns", lookup(env, "agent.harness.max_turns", None)),
        timeout_multiplier=lookup(env, "agent.harness.timeout_multiplier", 1.0),
        training_tasks=_training_tasks(run) if own_tasks else (),
    )


def _training_tasks(run: RunConfig) -> list[TaskRef]:
    """Return the tasks of all training sources, each once; the held-out side of a split is not among them."""
    sources = {key: env for key, env in plugin_envs(run, "").items() if key.startswith("orchestrator.train.")}
    tasks = [task for env in sources.values() for task in select_tasks(env.taskset).tasks]
    return list({task.key: task for task in tasks}.values())


def warm_up(
    config: WarmupConfig,
    out_dir: Path,
    *,
    rollouts: Rollouts | None = None,
    seed: int = 0,
    display: Display | None = None,
) -> Path:
    """Make a policy, save it to `out_dir`, and return `out_dir`.

    With `family`, the family's file makes the policy. With `run`, the model is trained on that run's good trials; else
    on replayed solutions, until it reaches `config.target`, or for `config.steps` steps. Without a target, these two
    guarantee no success rate.

    Args:
        config: The table.
        out_dir: Folder to write.
        rollouts: What the warm-up takes from the run that follows; None for a model's own format.
        seed: Seed of the order of demonstrations.
        display: Display of the progress.

    Raises:
        UserError: A file, folder or model is missing or invalid, or the target or the family's success rate was not
            reached.
    """
    if config.family is not None and not torch.cuda.is_available():
        # Its tiny model needs one. The other cores import the workers meanwhile; spinning threads would slow that down.
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # it would overwrite the run's bars
    display = display or Display()
    with atomic_folder(out_dir) as folder:
        if config.run is not None:
            _learn_trials(config, config.run, folder, seed, display)
        elif config.family is not None:
            load_task_generator(config.family).make_policy(config, folder, seed=seed, display=display)
        else:
            _learn_tasks(config, folder, rollouts or Rollouts(), seed, display)
    release_freed_memory()
    return out_dir


def _learn_tasks(config: WarmupConfig, folder: Path, rollouts: Rollouts, seed: int, display: Display) -> None:
    assert config.model is not None
    if config.tasks is not None:
        tasks = tasks_with_solution(config.tasks, display.line)
    else:
        tasks = with_solution(rollouts.training_tasks, TRAINING_TASKS, display.line)
    start = load_policy(config.model, rollouts.renderer)
    found = _replay_solutions(tasks, config, folder, display)
    system = SYSTEM_PROMPT if config.agent == PLAIN_AGENT else ""
    episodes = [start.encode(episode, system) for episode in found]
    fitting = _of_answer_length(episodes, rollouts.answer_length, display)
    sequences = [sequence for episode in fitting for sequence in episode]
    what = f"{len(fitting)} of {len(tasks)} solutions"
    measure = None
    if config.target is not None:
        played = [task.path for task in random.Random(seed).choices(tasks, k=config.trials)]
        measure = partial(
            measure_rewards,
            folder,
            lambda _: played,
            config,
            max_turns=rollouts.max_turns,
            max_length=rollouts.max_length,
            answer_length=rollouts.answer_length,
            temperature=rollouts.temperature,
            timeout_multiplier=rollouts.timeout_multiplier,
            trusted={task.path for task in tasks if is_trusted(task.name, config.trusted_tasks)},
        )
    _learn(what, start, sequences, config, folder, seed, display, measure)


def _of_answer_length(episodes: list[list[Encoded]], limit: int | None, display: Display) -> list[list[Encoded]]:
    """Return the episodes whose answers the run can sample whole.

    Raises:
        UserError: There is none.
    """
    if limit is None:
        return episodes
    lengths = [max(sequence.longest_answer() for sequence in episode) for episode in episodes]
    fitting = [episode for episode, length in zip(episodes, lengths, strict=True) if length <= limit]
    key, longest = "orchestrator.train.sampling.max_completion_tokens", max(lengths)
    if not fitting:
        what = f"the run samples at most {limit} tokens of an answer; the solutions have {min(lengths)} to {longest}"
        raise UserError(what, where=key, do=f"raise it to {longest}, or remove [warmup]")
    if dropped := len(episodes) - len(fitting):
        display.line(f"warm-up: skipping {plural(dropped, 'solution')} of up to {longest} tokens; {key} = {limit}")
    return fitting


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
    measure: Callable[..., list[float]] | None = None,
) -> None:
    """Train for `config.steps` steps; with `measure`, until the mean reward of real trials reaches `config.target`.

    Raises:
        UserError: The target was not reached.
    """
    trainer = SupervisedTrainer(start, lr=config.lr, lora_rank=config.lora_rank)
    rng = random.Random(seed)
    mean, target = 0.0, config.target or 0.0
    with display.bar("warm-up: supervised steps", config.steps) as bar:
        for step in range(config.steps):
            # With a target the number of steps is not known in advance, so the learning rate stays constant.
            scale = 1.0 if measure else 1 - step / config.steps
            loss = trainer.step(rng.choices(sequences, k=config.batch_size), scale=scale)
            bar.advance()
            done = step + 1
            if measure is None or (done % _STEPS_BETWEEN and done < config.steps):
                continue
            trainer.save(folder)
            release_freed_memory()  # the sampler needs it
            rewards = measure(seed=seed + done)
            mean = fmean(rewards)
            display.line(
                f"warm-up: {done} steps, loss {loss:.3f}, mean reward {mean:.2f} in {len(rewards)} real trials"
            )
            if mean >= target:
                break
    display.line(f"warm-up: {what}, {done} steps, loss {loss:.3f}")
    if mean < target:
        raise UserError(
            f"the mean reward after {config.steps} steps is {mean:.2f}, below the target {target}",
            where="warmup.target",
            do="raise warmup.steps or warmup.lr, or lower warmup.target",
        )
    if measure is None:
        trainer.save(folder)


def _replay_solutions(
    tasks: Sequence[TaskRef], config: WarmupConfig, folder: Path, display: Display
) -> list[Demonstration]:
    failed: list[str] = []

    def report(task: TaskRef, solved: bool) -> None:
        bar.advance()
        if not solved:
            failed.append(task.name)

    with display.bar("warm-up: replaying solutions", len(tasks)) as bar:
        playing = replay(
            tasks,
            environment_type=config.environment_type,
            environment_kwargs=config.environment_kwargs,
            agent=config.agent,
            trusted=config.trusted_tasks,
            work_dir=folder,
            report=report,
        )
        found = asyncio.run(playing)
    if not found:
        ways = "in one command of at most 10 s" if config.agent == PLAIN_AGENT else "typed into a terminal"
        raise UserError(
            f"no solution reaches the top reward when the agent runs it ({name_first(failed)})",
            where=str(config.tasks or TRAINING_TASKS),
            do=f"run `harbortrainer tasks check` on them; if they pass, they fail {ways}: remove [warmup]",
        )
    if failed:
        display.line(
            f"warm-up: skipping solutions without the top reward when the agent runs them: {name_first(failed)}"
        )
    return found
