"""The transcript of one trial: its messages, sampled tokens and verifier output.

A transcript is one gzip member with one line of JSON. So `zcat` prints a file of transcripts, and a `Place` is enough
to read one. The trial's results (outcome, rewards, advantage, timings) are in the trial's row, which names the place.

Invariant: the tokens on a path from a root to a leaf are the tokens that the model saw and sampled. Their
log-probabilities come from the sampler; nothing is re-tokenized.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FORMAT = 1
"""Version of the file format; a reader rejects other versions."""
DIGITS = 6
"""Significant digits of a stored log-probability."""


class Place(NamedTuple):
    """Location of one transcript."""

    file: str
    """Path relative to the folder of the run or evaluation."""
    offset: int
    """Offset in bytes."""
    length: int
    """Length in bytes."""


class TranscriptModel(BaseModel):
    """A part of a transcript; default values are not written."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TranscriptToolCall(TranscriptModel):
    """A tool that the model called."""

    name: str
    arguments: str
    """Arguments as the model wrote them."""


class TranscriptMessage(TranscriptModel):
    """One message, a node of the conversation graph; it adds T tokens."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    text: str = ""
    """Text of the message; Terminus-2's user messages are the terminal's screen."""
    thinking: str | None = None
    """The model's reasoning, if the renderer separates it."""
    tool_calls: list[TranscriptToolCall] = []
    parent: int | None = None
    """Index of the previous message; None for a root."""
    sampled: bool = False
    """Whether the model sampled the message here; false for an earlier answer that is only in the prompt."""
    token_ids: list[int] = []
    """[T] token ids of template and text; empty if the model's server returns no ids."""
    spans: list[int] = []
    """Run lengths of unsampled and sampled tokens in turn, starting with unsampled; their sum is T. Empty if none is
    sampled."""
    logprobs: list[float] = []
    """[S] log-probabilities of the sampled tokens, in order."""
    prompt_len: int = 0
    """Tokens from the root to the first sampled one; counted by the server if there are no token ids."""
    sampled_len: int = 0
    """Number of sampled tokens, S; counted by the server if there are no token ids."""
    version: int | None = None
    """The policy version that sampled the message."""
    finish: str | None = None
    """Finish reason: `stop`, `length` or `tool_calls`."""
    began: float | None = None
    """Seconds from the start of the trial to the call."""
    took: float | None = None
    """Duration of the call in seconds."""

    @property
    def mask(self) -> list[bool]:
        """[T] true for sampled tokens."""
        if not self.spans:
            return [False] * len(self.token_ids)
        return [own for length, own in zip(self.spans, cycle((False, True)), strict=False) for _ in range(length)]

    @property
    def sampled_ids(self) -> list[int]:
        """[S] ids of the sampled tokens."""
        return [token for token, own in zip(self.token_ids, self.mask, strict=True) if own]


class LostCall(TranscriptModel):
    """A model call without a message: it failed, was refused at a limit, or ended too late."""

    error: str
    began: float | None = None
    took: float | None = None


class ChangedFile(TranscriptModel):
    """A file that the agent added, changed or removed."""

    path: str
    how: str
    size: int = 0
    """Size in bytes."""
    before: str | None = None
    """Text before the agent started; None if there was no file or the text is not kept."""
    after: str | None = None
    """Text when the agent had ended; None if there was no file or the text is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model, with the new messages before it.

    Example:
        >>> [turn.prompt_len for turn in transcript.turns()]
        [212, 418]
    """

    number: int
    """Number of the answer, from 1, in sampling order."""
    index: int
    """Index of the answer in `Transcript.messages`."""
    shown: tuple[TranscriptMessage, ...]
    """Messages since the previous answer on the path; usually one, the terminal."""
    answer: TranscriptMessage
    trains: tuple[bool, ...]
    """[S] whether each sampled token is within `seq_len`, so that it trains if its trial does."""

    @property
    def prompt_len(self) -> int:
        """Tokens before the first sampled one."""
        return self.answer.prompt_len

    @property
    def token_ids(self) -> list[int]:
        """[S] ids of the sampled tokens."""
        return self.answer.sampled_ids

    @property
    def logprobs(self) -> list[float]:
        """[S] log-probabilities of the sampled tokens."""
        return self.answer.logprobs

    @property
    def version(self) -> int | None:
        """The policy version that sampled the answer."""
        return self.answer.version


class Transcript(TranscriptModel):
    """The transcript of one trial."""

    format: int = FORMAT
    trial: str
    """Name of the trial, as in its row."""
    messages: list[TranscriptMessage] = []
    """Nodes of the conversation graph in order of creation; rewritten history is a separate path."""
    lost_calls: list[LostCall] = []
    """The first twenty calls without a message."""
    seq_len: int | None = None
    """Longest sample in tokens; tokens beyond it did not train. None without training."""
    verifier_output: str = ""
    """Output of the verifier; of a long output, its beginning and end."""
    changed_files: list[ChangedFile] | None = None
    """The first hundred changed files; None if they are unknown."""
    changed_files_total: int = 0
    changed_tools: list[str] = []
    """Descriptions of changes to tools that the verifier uses."""
    error: str | None = None
    """The full error; the trial's row has it shortened."""
    evidence: str = ""
    """What the agent did, for a failure that it may have caused."""
    trial_dir: str | None = None
    """Harbor's folder of the trial, if it was kept."""
    advantages: dict[int, list[float]] = Field(default_factory=dict)
    """[S] per-token advantages by message index, if they differ within a message; else the row's advantage holds."""

    def turns(self) -> list[Turn]:
        """Return the sampled answers."""
        found = [(index, message) for index, message in enumerate(self.messages) if message.sampled]
        return [self._turn(number, *one) for number, one in enumerate(found, 1)]

    def _turn(self, number: int, index: int, answer: TranscriptMessage) -> Turn:
        room = answer.sampled_len if self.seq_len is None else self.seq_len - answer.prompt_len
        shown = []
        for before in reversed(self.path(index)[:-1]):
            if before.sampled:
                break
            shown.append(before)
        trains = tuple(position < room for position in range(answer.sampled_len))
        return Turn(number=number, index=index, shown=tuple(reversed(shown)), answer=answer, trains=trains)

    def path(self, index: int) -> list[TranscriptMessage]:
        """Return the messages from the root to message `index`."""
        found: list[TranscriptMessage] = []
        at: int | None = index
        while at is not None:
            found.append(self.messages[at])
            at = self.messages[at].parent
        return found[::-1]

    def branches(self) -> list[int]:
        """Return the indices of the leaves; each ends one sample."""
        parents = {message.parent for message in self.messages}
        return [index for index in range(len(self.messages)) if index not in parents]

    def packed(self) -> bytes:
        """Return the transcript as a gzip member."""
        content = {"format": FORMAT, **self.model_dump(mode="json", exclude_defaults=True)}
        line = json.dumps(content, separators=(",", ":")) + "\n"
        return gzip.compress(line.encode("ascii"), compresslevel=6, mtime=0)

    @classmethod
    def unpacked(cls, member: bytes) -> Self | None:
        """Read a gzip member; None if it is torn, not a transcript, or of another format."""
        try:
            found = cls.model_validate_json(gzip.decompress(member))
        except (OSError, EOFError, zlib.error, ValidationError):
            return None
        return found if found.format == FORMAT else None
