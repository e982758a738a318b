"""The good trials of a run, for supervised fine-tuning: training trials with a minimum reward.

Contract: this reads the run folder of either engine, also during the run, and counts rejected trials by reason.
Invariants: no trial is from an evaluation, lacks a reward, or has an agent that changed the verifier's tools. Each
conversation ends with an answer that was sampled and not cut off. `is_cut` names earlier answers that were cut off.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.prime_rl_files import episode_of, row_of_line, training_files
from harbortrainer.runs.sealed_files import open_lines
from harbortrainer.runs.trace_transcript import transcript_of_episode
from harbortrainer.runs.transcript import Transcript, TranscriptMessage
from harbortrainer.runs.transcript_files import read_transcript, transcript_place
from harbortrainer.runs.trial_row import TrialRow, read_rows

STEP_FILE = re.compile(r"step_(\d+)")
LENGTH = "length"
"""Finish reason of an answer that was cut off."""


@dataclass(frozen=True, slots=True)
class GoodTrial:
    """A trial with a good reward, and its transcript."""

    row: TrialRow
    transcript: Transcript

    def branches(self) -> Iterator[list[TranscriptMessage]]:
        """Yield the trial's conversations, each from its root to the last complete sampled answer.

        A multi-step task has a conversation per step, and a rewritten history adds one. Prefixes are left out.
        """
        found = [trim_to_answer(self.transcript.path(leaf)) for leaf in self.transcript.branches()]
        for path in found:
            is_prefix = any(other is not path and extends(other, path) for other in found)
            if path and not is_prefix:
                yield path


def trim_to_answer(path: list[TranscriptMessage]) -> list[TranscriptMessage]:
    """Return a path up to its last complete sampled answer; empty if there is none."""
    for end in range(len(path), 0, -1):
        if path[end - 1].sampled and not is_cut(path[end - 1]):
            return path[:end]
    return []


def is_cut(message: TranscriptMessage) -> bool:
    """Whether a sampled answer was cut off at its length; an agent may go on after it."""
    return message.sampled and message.finish == LENGTH


def extends(path: list[TranscriptMessage], start: list[TranscriptMessage]) -> bool:
    """Whether `path` starts with the messages of `start` and is longer."""
    return len(path) > len(start) and all(own is other for own, other in zip(path, start, strict=False))


def good_trials(run: Path, *, min_reward: float, left_out: Counter[str]) -> Iterator[GoodTrial]:
    """Yield the training trials of a run with at least this reward.

    Args:
        run: The run folder.
        min_reward: The minimum reward.
        left_out: Counter of the rejected trials by reason; it is updated.

    Raises:
        UserError: The run has no trials.
    """
    for file in require_rollout_files(run):
        for row, transcript in _trials(run, file):
            if (reason := _rejection(row, transcript, min_reward)) is not None:
                left_out[reason] += 1
            elif transcript is not None:
                trial = GoodTrial(row, transcript)
                if next(trial.branches(), None) is None:
                    left_out["without a complete answer"] += 1
                else:
                    yield trial


def require_rollout_files(run: Path) -> list[Path]:
    """Return the files of a run's training trials. Raises `UserError` if there are none."""
    files = rollout_files(run)
    if not files:
        do = "pass the folder of a run that finished at least one step"
        raise UserError("this run has no trials", where=str(run), do=do)
    return files


def rollout_files(run: Path) -> list[Path]:
    """Return the files of a run's training trials, in the order of steps."""
    ours = [path for path in (run / "rollouts").glob("step_*.jsonl") if STEP_FILE.fullmatch(path.stem)]
    return sorted(ours, key=lambda path: int(path.stem.removeprefix("step_"))) or training_files(run)


def _trials(run: Path, file: Path) -> Iterator[tuple[TrialRow, Transcript | None]]:
    if STEP_FILE.fullmatch(file.stem):
        for row in read_rows(file):
            place = transcript_place(file.stem, row.transcript) if row.transcript else None
            yield row, read_transcript(run, place, row.trial) if place else None
        return
    with open_lines(file) as lines:
        for content in lines:
            episode = episode_of(content)
            row = row_of_line(episode, file)
            if row is not None and row.kind == "train":
                yield row, transcript_of_episode(episode)


def _rejection(row: TrialRow, transcript: Transcript | None, min_reward: float) -> str | None:
    """Return the reason to reject a trial; None for a good one."""
    if row.kind != "train":
        return "of an evaluation"
    if row.reward is None:
        return "without a reward"
    if row.reward < min_reward:
        return f"with a reward under {min_reward:g}"
    if transcript is None:
        return "without a transcript"
    if transcript.changed_tools:
        return "whose agent changed tools that the verifier uses"
    return None
