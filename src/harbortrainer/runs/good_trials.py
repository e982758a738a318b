"""The trials of a run that a policy can learn from by example: graded well, played on tasks that are trained on.

Contract: reads the run folder of either engine (`rollouts/`), while the run goes on too; what is left out is counted by
its reason. Invariants: a trial of an evaluation is never among them, nor one without a reward, nor one whose agent
changed tools that a verifier is run with; what is given as an answer was sampled, to its end.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.trace_transcript import of_episode
from harbortrainer.runs.transcript import KeptMessage, Place, Transcript
from harbortrainer.runs.transcript_files import read
from harbortrainer.runs.trial_line import SeenLine, TrialLine

STEP_FILE = re.compile(r"step_(\d+)")
PRIME_EPISODES = "train/all/traces.jsonl"
CUT_OFF = "length"
"""Why the model stopped where its answer was too long."""


@dataclass(frozen=True, slots=True)
class GoodTrial:
    """A trial to learn from."""

    line: TrialLine
    transcript: Transcript

    def branches(self) -> Iterator[list[KeptMessage]]:
        """Its conversations, each from its root to a sampled answer that was not cut off, longest ones only.

        A task of several steps has one for each step; a history that was rewritten makes another.
        """
        found = [whole(self.transcript.path(leaf)) for leaf in self.transcript.branches()]
        for path in found:
            begins = any(other is not path and starts_with(other, path) for other in found)
            if path and not begins:
                yield path


def whole(path: list[KeptMessage]) -> list[KeptMessage]:
    """A path up to its last sampled answer that was not cut off; empty when there is none."""
    for end in range(len(path), 0, -1):
        if path[end - 1].sampled and path[end - 1].finish != CUT_OFF:
            return path[:end]
    return []


def starts_with(path: list[KeptMessage], start: list[KeptMessage]) -> bool:
    """Whether `path` begins with the messages of `start` and goes on."""
    return len(path) > len(start) and all(own is other for own, other in zip(path, start, strict=False))


def good_trials(run: Path, *, min_reward: float, left_out: Counter[str]) -> Iterator[GoodTrial]:
    """The trials of a run's training with at least this reward.

    Args:
        run: Its folder.
        min_reward: The least reward.
        left_out: Counts what is left out, by reason.

    Raises:
        UserError: The folder holds no run's trials.
    """
    files = rollout_files(run)
    if not files:
        do = "name a run's folder in which a step was finished"
        raise UserError("no trials of a run here", where=str(run / "rollouts"), do=do)
    for file in files:
        for line, transcript in _trials(run, file):
            if (why := _unfit(line, transcript, min_reward)) is not None:
                left_out[why] += 1
            elif transcript is not None:
                trial = GoodTrial(line, transcript)
                if next(trial.branches(), None) is None:
                    left_out["without an answer that came to its end"] += 1
                else:
                    yield trial


def rollout_files(run: Path) -> list[Path]:
    """The files of a run's training trials, in the order of steps."""
    here = [path for path in (run / "rollouts").glob("step_*") if STEP_FILE.fullmatch(path.stem)]
    here.sort(key=lambda path: int(path.stem.removeprefix("step_")))
    files = [path / PRIME_EPISODES if path.is_dir() else path for path in here]
    return [path for path in files if path.is_file()]


def _trials(run: Path, file: Path) -> Iterator[tuple[TrialLine, Transcript | None]]:
    if file.name != Path(PRIME_EPISODES).name:
        for row in read_lines(file):
            line = _told(row, file)
            yield line, read(run, line.place, line.trial) if line.place else None
        return
    step, name = int(file.parents[2].name.removeprefix("step_")), str(file.relative_to(run))
    offset = 0
    with file.open("rb") as lines:
        for content in lines:
            try:
                episode = SeenLine.model_validate_json(content)
            except ValidationError:
                episode = None  # a last line that is being written
            place = Place(name, offset, len(content))
            offset += len(content)
            if episode is not None:
                line = TrialLine.of_episode(episode, step=step, kind="train", trained=False, place=place)
                yield line, of_episode(content)


def _told(row: dict[str, object], file: Path) -> TrialLine:
    try:
        return TrialLine.of_rollout(row, file.stem)
    except ValidationError as error:
        what = f"a line cannot be read ({error.errors()[0]['msg']})"
        raise UserError(what, where=str(file), do="use the release that wrote this run") from None


def _unfit(line: TrialLine, transcript: Transcript | None, min_reward: float) -> str | None:
    """Why a trial is not learned from; None for a good one."""
    if line.kind != "train":
        return "of an evaluation"
    if line.reward is None:
        return "without a reward"
    if line.reward < min_reward:
        return f"under {min_reward:g}"
    if transcript is None:
        return "whose transcript is not kept"
    if transcript.changed_tools:
        return "whose agent changed tools that a verifier is run with"
    return None
