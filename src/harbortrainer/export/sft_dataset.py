"""Good trials as a JSON Lines dataset for supervised fine-tuning with TRL or Prime-RL's `sft`, a line per conversation.

    {"messages": [{"role": ..., "content": ..., "reasoning_content"?: ..., "tool_calls"?: [...]}, ...],
     "task": ..., "source": ..., "step": ..., "trial": ..., "reward": ...}

Both read `messages` as a conversation and ignore the other columns (`src/prime_rl/trainer/sft/data.py`, 559b44772;
TRL's conversational language modelling). Both train on every assistant message. So a conversation with an assistant
message that the policy did not sample, or that was cut off, is left out. The file is written atomically and has
no duplicate conversations.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.durable import flush
from harbortrainer.runs.good_trials import GoodTrial, good_trials, is_cut
from harbortrainer.runs.transcript import TranscriptMessage

REWRITTEN = "conversations with an answer that the policy did not give (rewritten history)"
CUT = "conversations with an answer that was cut at its length"
DUPLICATE = "duplicate conversations"


@dataclass
class SftDataset:
    """Counts of a written dataset."""

    rows: int = 0
    trials: int = 0
    tasks: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    """Counts of the left out trials and conversations, by reason."""

    @classmethod
    def write(cls, run: Path, file: Path, *, min_reward: float) -> "SftDataset":
        """Write the good trials of a run into a new file.

        Raises:
            UserError: The file exists, or the run has no good trials.
            RunStoppedError: The disk is full.
        """
        if file.exists():
            raise UserError("already exists", where=str(file), do="pass another file, or remove it")
        found, draft = cls(), file.with_name(f".{file.name}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as lines:
                for row in found._rows(run, min_reward):
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            if not found.rows:
                raise UserError(f"no good trials in this run: {found.reasons}", where=str(run), do="lower --min-reward")
            flush(draft)
            draft.replace(file)
        except OSError as error:
            what = f"cannot write {file}: {error.strerror or error}"
            raise RunStoppedError(what, do="free disk space, or pass another file") from error
        finally:
            draft.unlink(missing_ok=True)
        return found

    @property
    def reasons(self) -> str:
        """Formatted counts of `left_out`."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common()) or "it has no trials"

    def _rows(self, run: Path, min_reward: float) -> Iterator[dict[str, object]]:
        seen: set[bytes] = set()
        for trial in good_trials(run, min_reward=min_reward, left_out=self.left_out):
            before = self.rows
            for path in trial.branches():
                if any(message.role == "assistant" and not message.sampled for message in path):
                    self.left_out[REWRITTEN] += 1
                    continue
                if any(map(is_cut, path)):
                    self.left_out[CUT] += 1
                    continue
                row = row_of(trial, path)
                digest = hashlib.sha256(json.dumps(row["messages"]).encode()).digest()
                if digest in seen:
                    self.left_out[DUPLICATE] += 1
                    continue
                seen.add(digest)
                self.rows += 1
                yield row
            if self.rows > before:
                self.trials += 1
                self.tasks.add(trial.row.task_key or trial.row.task)


def row_of(trial: GoodTrial, path: list[TranscriptMessage]) -> dict[str, object]:
    """Return the line of one conversation."""
    row = trial.row
    about = {"task": row.task, "source": row.source, "step": row.step, "trial": row.trial, "reward": row.reward}
    return {"messages": [message_of(message) for message in path], **about}


def message_of(message: TranscriptMessage) -> dict[str, object]:
    """Return one message in the format of chat templates."""
    found: dict[str, object] = {"role": message.role, "content": message.text}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found
