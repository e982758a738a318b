"""What is kept of one trial to be looked at: what was said, every sampled token, what the verifier printed.

A transcript lies as one gzip member that holds one line of JSON, so that `zcat` prints a file of them and one of them
is read by its `Place` alone. What came of the trial (outcome, rewards, advantage, why it did not train, timings) is not
said again here: it stands in the trial's line, which names the place. Invariant: the tokens of a path from a root to a
leaf, one message after the other, are what the model saw and sampled, with the log-probabilities that it was sampled
at; nothing is tokenized again.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FORMAT = 1
"""Of what is written here; a reader refuses another."""
DIGITS = 6
"""Significant digits of a log-probability that are kept."""


class Place(NamedTuple):
    """Where one transcript lies."""

    file: str
    """Relative to the folder of the run or the evaluation."""
    offset: int
    """Bytes before it."""
    length: int
    """Bytes of it."""


class KeptModel(BaseModel):
    """What of a transcript is written is what is not the default."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class KeptToolCall(KeptModel):
    """A tool that the model called."""

    name: str
    arguments: str
    """As the model wrote them."""


class KeptMessage(KeptModel):
    """One message, a node of the conversation's graph: T tokens that it adds to what came before."""

    role: str
    """system, user, assistant or tool."""
    text: str = ""
    """What it says; of Terminus-2's user messages the terminal's screen as the model saw it."""
    thinking: str | None = None
    """The model's reasoning, where the renderer tells it apart."""
    tool_calls: list[KeptToolCall] = []
    parent: int | None = None
    """Index of the message before it; None for a root."""
    sampled: bool = False
    """Whether the model said it here; also false for an answer that was only shown to it."""
    token_ids: list[int] = []
    """[T] template and text; empty where the model's server tells no ids."""
    spans: list[int] = []
    """Tokens by turns not sampled and sampled, beginning with those not sampled; [T] in sum, empty for none sampled."""
    logprobs: list[float] = []
    """[S] of the sampled tokens, in order."""
    prompt_len: int = 0
    """Tokens before the first sampled one, from the root; as the server counted them where no ids are told."""
    sampled_len: int = 0
    """Sampled tokens, S; as the server counted them where no ids are told."""
    version: int | None = None
    """The policy version that sampled it."""
    finish: str | None = None
    """Why the model stopped: stop, length, tool_calls."""
    began: float | None = None
    """Seconds from the beginning of the trial to the call."""
    took: float | None = None
    """Seconds of the call."""

    @property
    def mask(self) -> list[bool]:
        """[T] true where the token was sampled."""
        if not self.spans:
            return [False] * len(self.token_ids)
        return [own for length, own in zip(self.spans, cycle((False, True)), strict=False) for _ in range(length)]

    @property
    def sampled_ids(self) -> list[int]:
        """[S] the tokens that the model sampled."""
        return [token for token, own in zip(self.token_ids, self.mask, strict=True) if own]


class LostCall(KeptModel):
    """A model call that is no message: it failed, was refused at a limit, or came too late."""

    error: str
    began: float | None = None
    took: float | None = None


class KeptChange(KeptModel):
    """A file that the agent added, changed or removed."""

    path: str
    how: str
    size: int = 0
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model and what it was shown before.

    Example:
        >>> [turn.prompt_len for turn in transcript.turns()]
        [212, 418]
    """

    number: int
    """From 1, in the order in which they were sampled."""
    index: int
    """Of the answer in `Transcript.messages`."""
    shown: tuple[KeptMessage, ...]
    """What was added since the answer before it on its path: usually one message, the terminal."""
    answer: KeptMessage
    trains: tuple[bool, ...]
    """[S] whether each sampled token lies within the longest sample, so that it trains if its trial does."""

    @property
    def prompt_len(self) -> int:
        """Tokens before its first sampled one."""
        return self.answer.prompt_len

    @property
    def token_ids(self) -> list[int]:
        """[S] sampled tokens."""
        return self.answer.sampled_ids

    @property
    def logprobs(self) -> list[float]:
        """[S] their log-probabilities."""
        return self.answer.logprobs

    @property
    def version(self) -> int | None:
        """The policy version that sampled it."""
        return self.answer.version


class Transcript(KeptModel):
    """One trial."""

    format: int = FORMAT
    trial: str
    """The trial's name, as in its line."""
    messages: list[KeptMessage] = []
    """The graph, in the order in which it grew; history that was rewritten is another path of it."""
    lost_calls: list[LostCall] = []
    """The first twenty calls without an answer."""
    seq_len: int | None = None
    """Most tokens of a sample: what lies beyond did not train. None where nothing trains."""
    verifier_output: str = ""
    """What the verifier printed, its beginning and its end where it was long."""
    changed_files: list[KeptChange] | None = None
    """The first hundred; None where nobody can tell."""
    changed_files_total: int = 0
    changed_tools: list[str] = []
    """Which changes touch what a verifier is run with, in words."""
    error: str | None = None
    """What failed, in full; its line has it cut."""
    evidence: str = ""
    """Of a failure that the agent may have brought about: what it did."""
    trial_dir: str | None = None
    """Harbor's folder of the trial, where it was kept."""
    advantages: dict[int, list[float]] = Field(default_factory=dict)
    """[S] of each message by its index, where they differ from token to token; else the line's holds for all."""

    def turns(self) -> list[Turn]:
        """Every sampled answer."""
        found = [(index, message) for index, message in enumerate(self.messages) if message.sampled]
        return [self._turn(number, *one) for number, one in enumerate(found, 1)]

    def _turn(self, number: int, index: int, answer: KeptMessage) -> Turn:
        room = answer.sampled_len if self.seq_len is None else self.seq_len - answer.prompt_len
        shown = []
        for before in reversed(self.path(index)[:-1]):
            if before.sampled:
                break
            shown.append(before)
        trains = tuple(position < room for position in range(answer.sampled_len))
        return Turn(number=number, index=index, shown=tuple(reversed(shown)), answer=answer, trains=trains)

    def path(self, index: int) -> list[KeptMessage]:
        """The messages from the root to message `index`."""
        found: list[KeptMessage] = []
        at: int | None = index
        while at is not None:
            found.append(self.messages[at])
            at = self.messages[at].parent
        return found[::-1]

    def branches(self) -> list[int]:
        """The index of every leaf: each is the end of one sample."""
        parents = {message.parent for message in self.messages}
        return [index for index in range(len(self.messages)) if index not in parents]

    def packed(self) -> bytes:
        """The gzip member that is written."""
        told = {"format": FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}
        line = json.dumps(told, separators=(",", ":")) + "\n"
        return gzip.compress(line.encode("ascii"), compresslevel=6, mtime=0)

    @classmethod
    def unpacked(cls, member: bytes) -> Self | None:
        """The transcript in a member; None when it is torn, or no transcript, or of another format."""
        try:
            found = cls.model_validate_json(gzip.decompress(member))
        except (OSError, EOFError, zlib.error, ValidationError):
            return None
        return found if found.format == FORMAT else None
