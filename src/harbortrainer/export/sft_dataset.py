"""Good trials as a dataset for supervised training: a line a conversation, as TRL and Prime-RL's `sft` read it.

    {"messages": [{"role": ..., "content": ..., "reasoning_content"?: ..., "tool_calls"?: [...]}, ...],
     "task": ..., "source": ..., "step": ..., "trial": ..., "reward": ...}

Both take `messages` as a whole conversation and look at no other column (`src/prime_rl/trainer/sft/data.py`, 559b44772;
TRL's conversational language modelling). Both learn every assistant message, by role, so a conversation that shows
one which the policy did not say is left out. The file appears whole or not at all; the same conversation stands once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.durable import flush
from harbortrainer.runs.good_trials import GoodTrial, good_trials
from harbortrainer.runs.transcript import KeptMessage

REWRITTEN = "conversations that show an answer which the policy did not give (its history was rewritten)"
TWICE = "conversations that are there already"


@dataclass
class SftDataset:
    """What was written."""

    rows: int = 0
    trials: int = 0
    tasks: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    """What was not, by reason."""

    @classmethod
    def write(cls, run: Path, file: Path, *, min_reward: float) -> "SftDataset":
        """Write the good trials of a run into a new file.

        Raises:
            UserError: The file is there, the folder holds no trials, or none of them is good.
            RunStoppedError: The disk is full.
        """
        if file.exists():
            raise UserError("is there already", where=str(file), do="name another file, or remove it")
        found, draft = cls(), file.with_name(f".{file.name}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as lines:
                for row in found._rows(run, min_reward):
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            if not found.rows:
                raise UserError(
                    f"no trial of this run is good: {found.reasons}", where=str(run), do="lower --min-reward"
                )
            flush(draft)
            draft.replace(file)
        except OSError as error:
            what = f"cannot write {file}: {error.strerror or error}"
            raise RunStoppedError(what, do="make room, or name another file") from error
        finally:
            draft.unlink(missing_ok=True)
        return found

    @property
    def reasons(self) -> str:
        """What was left out, in words."""
        return ", ".join(f"{count} {why}" for why, count in self.left_out.most_common()) or "there is none"

    def _rows(self, run: Path, min_reward: float) -> Iterator[dict[str, object]]:
        seen: set[bytes] = set()
        for trial in good_trials(run, min_reward=min_reward, left_out=self.left_out):
            before = self.rows
            for path in trial.branches():
                if any(message.role == "assistant" and not message.sampled for message in path):
                    self.left_out[REWRITTEN] += 1
                    continue
                row = row_of(trial, path)
                digest = hashlib.sha256(json.dumps(row["messages"]).encode()).digest()
                if digest in seen:
                    self.left_out[TWICE] += 1
                    continue
                seen.add(digest)
                self.rows += 1
                yield row
            if self.rows > before:
                self.trials += 1
                self.tasks.add(trial.line.task_key or trial.line.task)


def row_of(trial: GoodTrial, path: list[KeptMessage]) -> dict[str, object]:
    """One conversation as a line."""
    line = trial.line
    about = {"task": line.task, "source": line.source, "step": line.step, "trial": line.trial, "reward": line.reward}
    return {"messages": [message_of(message) for message in path], **about}


def message_of(message: KeptMessage) -> dict[str, object]:
    """One message as chat templates take it."""
    told: dict[str, object] = {"role": message.role, "content": message.text}
    if message.thinking:
        told["reasoning_content"] = message.thinking
    if message.tool_calls:
        told["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return told
