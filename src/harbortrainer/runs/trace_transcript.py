"""Convert a verifiers trace, in memory or as written by Prime-RL, into a transcript.

Contract: the models here use verifiers' names for the parts of a trace (`nodes`, `calls`, `info["harbor"]`), and read
an object or its JSON. Missing parts are left out of the transcript.

verifiers' own wire types are not used: importing them loads thousands of modules, which would slow down
`harbortrainer view` by seconds, and they refuse a trace that lacks a required field.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from harbortrainer.runs.transcript import (
    DIGITS,
    ChangedFile,
    LostCall,
    Transcript,
    TranscriptMessage,
    TranscriptToolCall,
)

MAX_LOST_CALLS = 20
RECORD = "harbor"
"""Key of a trace's `info` with the trial's record (`trials/record.py`)."""
_LIMITS = (
    *("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens"),
    *("context_length", "compaction_failed"),
)
"""Stop conditions of truncated traces, as verifiers defines them."""


def as_list[T](values: T) -> T:
    """Return the per-token values of a trace as a list; verifiers 0.4.1 keeps them as numpy arrays."""
    tolist = getattr(values, "tolist", None)
    return values if tolist is None else tolist()


type PerToken[T] = Annotated[list[T], BeforeValidator(as_list)]


class TraceModel(BaseModel):
    """A part of a trace, as an object or as JSON."""

    model_config = ConfigDict(from_attributes=True, extra="ignore")


class TracePart(TraceModel):
    """A part of a message: text, or something else."""

    type: str = ""
    text: str | None = None


class TraceToolCall(TraceModel):
    """A tool that the model called."""

    name: str = ""
    arguments: str = ""


class TraceMessage(TraceModel):
    """A message."""

    role: str
    content: str | list[TracePart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[TraceToolCall] | None = None

    @property
    def text(self) -> str:
        """The text of the message; the type of a non-text part is shown in brackets."""
        if isinstance(self.content, list):
            return "\n".join(part.text if part.text is not None else f"[{part.type}]" for part in self.content)
        return self.content or ""


class TraceNode(TraceModel):
    """A message with the tokens that it adds: a node of the conversation's graph."""

    message: TraceMessage
    parent: int | None = None
    sampled: bool = False
    token_ids: PerToken[int] = []
    mask: PerToken[bool] = []
    logprobs: PerToken[float] = []
    advantages: PerToken[float] | None = None


class TraceUsage(TraceModel):
    """Tokens of a call, as counted by the server."""

    prompt_tokens: int = 0
    """Prompt tokens outside of the server's cache."""
    cached_input_tokens: int | None = None
    completion_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """Number of all prompt tokens."""
        return self.prompt_tokens + (self.cached_input_tokens or 0)


class TraceSpan(TraceModel):
    """Start and end times, in seconds."""

    start: float = 0.0
    end: float = 0.0


class TraceError(TraceModel):
    """An error."""

    type: str = ""
    message: str = ""


class TraceCall(TraceModel):
    """A model call."""

    node: int | None = None
    finish_reason: str | None = None
    usage: TraceUsage | None = None
    time: TraceSpan = TraceSpan()
    error: TraceError | None = None


class Trace(TraceModel):
    """A trace."""

    id: str
    nodes: list[TraceNode] = []
    calls: list[TraceCall] = []
    info: dict[str, object] = {}
    timing: TraceSpan = TraceSpan()
    errors: list[TraceError] = []
    ok: bool | None = None
    """Whether its agent ended without an error."""
    stop_condition: str | None = None

    @property
    def branch_lengths(self) -> list[int]:
        """Tokens from the root to each leaf."""
        leaves, before = set(range(len(self.nodes))) - {node.parent for node in self.nodes}, _lengths(self.nodes)
        return [before[leaf] + len(self.nodes[leaf].token_ids) for leaf in sorted(leaves)]

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it, by verifiers' definition."""
        last = next((call for call in reversed(self.calls) if call.error is None), None)
        return self.stop_condition in _LIMITS or (last is not None and last.finish_reason == "length")


class TraceRecord(TraceModel):
    """The fields of a trial's record that the transcript has and the trial's row has not."""

    trial_name: str = ""
    trial_dir: str | None = None
    verifier_output: str = ""
    error: TraceError | None = None
    evidence: str = ""
    changed_files: list[ChangedFile] | None = None
    changed_files_total: int = 0
    changed_tools: list[str] = []


def transcript_of(
    trace: object, *, versions: Mapping[int, int] | None = None, seq_len: int | None = None
) -> Transcript:
    """Return the transcript of a trace.

    Args:
        trace: A verifiers trace, or its JSON.
        versions: The policy version of every sampled node, by its index.
        seq_len: Longest training sample, in tokens.
    """
    seen = Trace.model_validate(trace)
    record = TraceRecord.model_validate(seen.info.get(RECORD) or {})
    calls = {call.node: call for call in seen.calls if call.node is not None}
    lengths = _lengths(seen.nodes)
    messages = [
        _message(node, lengths[index], calls.get(index), seen.timing.start, (versions or {}).get(index))
        for index, node in enumerate(seen.nodes)
    ]
    error = record.error or (seen.errors[-1] if seen.errors else None)
    return Transcript(
        trial=record.trial_name or seen.id,
        messages=messages,
        lost_calls=[_lost(call, seen.timing.start) for call in seen.calls if call.node is None][:MAX_LOST_CALLS],
        seq_len=seq_len,
        verifier_output=record.verifier_output,
        changed_files=record.changed_files,
        changed_files_total=record.changed_files_total,
        changed_tools=record.changed_tools,
        error=f"{error.type}: {error.message}" if error else None,
        evidence=record.evidence,
        trial_dir=record.trial_dir,
        advantages={i: own for i, node in enumerate(seen.nodes) if len(set(own := node.advantages or [])) > 1},
    )


def transcript_of_episode(line: Mapping[str, object]) -> Transcript | None:
    """Return the transcript of the first trace of an episode as Prime-RL writes it; None if it has no trace."""
    traces = line.get("traces")
    return transcript_of(traces[0]) if isinstance(traces, list) and traces else None


def _lengths(nodes: Sequence[TraceNode]) -> list[int]:
    """Count the tokens from the root to each node, excluding it. Parents come before their children."""
    lengths: list[int] = []
    for node in nodes:
        before = 0 if node.parent is None else lengths[node.parent] + len(nodes[node.parent].token_ids)
        lengths.append(before)
    return lengths


def _message(
    node: TraceNode, before: int, call: TraceCall | None, start: float, version: int | None
) -> TranscriptMessage:
    message = node.message
    shown = TranscriptMessage(
        role=message.role,
        text=message.text,
        thinking=message.reasoning_content,
        tool_calls=[TranscriptToolCall(name=one.name, arguments=one.arguments) for one in message.tool_calls or []],
        parent=node.parent,
        sampled=node.sampled,
        token_ids=node.token_ids,
    )
    if not node.sampled:
        return shown
    usage = call.usage if call is not None and call.usage is not None else TraceUsage()
    known = any(node.mask)
    answer = {
        "spans": _spans(node.mask),
        "logprobs": [float(f"{value:.{DIGITS}g}") for value in node.logprobs],
        "prompt_len": before + node.mask.index(True) if known else usage.input_tokens,
        "sampled_len": sum(node.mask) if known else usage.completion_tokens,
        "version": version,
        "finish": call.finish_reason if call else None,
        "began": _since(call, start),
        "took": _took(call),
    }
    return shown.model_copy(update=answer)


def _spans(mask: Sequence[bool]) -> list[int]:
    """Return the run lengths of a mask, starting with a false run; empty if no value is true."""
    if not any(mask):
        return []
    runs = [len(list(run)) for _, run in groupby(mask)]
    return [0, *runs] if mask[0] else runs


def _lost(call: TraceCall, start: float) -> LostCall:
    error = f"{call.error.type}: {call.error.message}" if call.error else "its answer is not part of the conversation"
    return LostCall(error=error[:1000], began=_since(call, start), took=_took(call))


def _since(call: TraceCall | None, start: float) -> float | None:
    known = call is not None and call.time.start and start
    return round(call.time.start - start, 3) if call is not None and known else None


def _took(call: TraceCall | None) -> float | None:
    known = call is not None and call.time.end
    return round(call.time.end - call.time.start, 3) if call is not None and known else None
