"""Token capture with `capture = "rollout_details"`: the agent's sampling arguments, and its calls as a trace.

- One model call is one sampled node. A prompt that extends a branch's tokens continues the branch; any other prompt (a
  summary, dropped reasoning, the next step of a task) forks or starts another.
- New prompt tokens are marked as the agent's message only if the renderer gives that message exactly these tokens;
  otherwise they belong to no message.

Invariant: fail closed. A call without ids or log-probabilities, or with lists of unequal length, fails the whole trial.
Nothing is guessed, and no trained token is re-tokenized.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from renderers.base import RenderedTokens
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Message, Response, TurnTokens, Usage, UserMessage

from harbortrainer.environment.verifiers_compat import SALT, BodyLocator, SamplingConfig, commit_call
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens as HarborTurn
from harbortrainer.trials.tokens import find_turn_fault

# Sampling that leaves the model's distribution unchanged, as the trainer's log-probabilities assume.
PLAIN_SAMPLING = {"temperature": 1.0, "top_k": -1, "min_p": 0.0}
_OPENAI_KEYS = ("top_p", "max_tokens", "seed", "stop")


@dataclass(frozen=True)
class _Path:
    """A committed answer with its whole prompt: the tokens, and the messages that identify its nodes."""

    prompt_ids: list[int]
    completion_ids: list[int]
    messages: list[Message]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


def direct_kwargs(sampling: SamplingConfig, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return Terminus-2's arguments for calls that return token ids, with the run's sampling.

    Args:
        sampling: The run's sampling.
        own: The user's agent arguments.
    """
    merged = sampling.model_dump(exclude_none=True)
    merged = PLAIN_SAMPLING | (merged.pop("extra_body", None) or {}) | merged
    call = {key: merged[key] for key in _OPENAI_KEYS if key in merged}
    call["extra_body"] = {key: merged[key] for key in ("top_k", "min_p", SALT) if key in merged}
    own_call = own.get("llm_call_kwargs")
    return {
        "collect_rollout_details": True,
        "temperature": merged["temperature"],
        "llm_call_kwargs": (own_call if isinstance(own_call, dict) else {}) | call,
    }


def commit_turns(trace: Trace, turns: list[HarborTurn], model: str, locate_body: BodyLocator | None = None) -> None:
    """Commit the calls of a finished trial to an empty trace, in call order.

    Args:
        trace: A trace without sampled tokens.
        turns: One per model call.
        model: Name of the sampled model, recorded with each call.
        locate_body: Separates a message's body from the template around it.

    Raises:
        TokensMissingError: There are no turns, or one is incomplete. The trace is unchanged.
    """
    if not turns:
        raise TokensMissingError("the server returned no token ids; it must support return_token_ids and logprobs")
    for number, turn in enumerate(turns, start=1):
        fault = find_turn_fault(turn.prompt_ids, turn.completion_ids, turn.logprobs)
        if fault or not turn.completion_ids:
            raise TokensMissingError(f"turn {number}: {fault or 'the answer has no token ids'}")
    paths: list[_Path] = []
    for turn in turns:
        paths.append(_commit(trace, turn, model, paths, locate_body))


def _commit(trace: Trace, turn: HarborTurn, model: str, paths: list[_Path], locate_body: BodyLocator | None) -> _Path:
    before = _longest_prefix(turn.prompt_ids, paths)
    added = turn.prompt_ids[len(before.token_ids) :]
    prompt: list[Message] = [*before.messages, UserMessage(content=_placeholder("prompt", added))]
    answer = AssistantMessage(content=_placeholder("answer", turn.completion_ids))
    response = _response(turn, model, answer)
    if locate_body is not None and response.tokens is not None:
        _mark_message_tokens(response.tokens, turn, before, locate_body)
    commit_call(trace, prompt, response)
    return _Path(turn.prompt_ids, turn.completion_ids, [*prompt, answer])


def _mark_message_tokens(tokens: TurnTokens, turn: HarborTurn, before: _Path, locate_body: BodyLocator) -> None:
    """Mark which of the prompt's new tokens are the agent's message, and which are the message's body."""
    if not before.messages or turn.new_message is None:
        return
    rendered = locate_body(before.prompt_ids, before.completion_ids, turn.new_message)
    if rendered is None or rendered.token_ids != turn.prompt_ids:
        return
    start = len(before.token_ids)
    added = RenderedTokens(message_indices=rendered.message_indices[start:], message_roles=rendered.message_roles)
    spans = [(first + start, end + start) for first, end in filter(None, added.message_token_spans())]
    if len(spans) == 1:
        tokens.message_spans = [*(None for _ in before.messages), *spans]
        tokens.is_content = list(rendered.is_content)


def _longest_prefix(prompt_ids: list[int], paths: list[_Path]) -> _Path:
    """Return the longest committed path that this prompt begins with."""
    fitting = (path for path in paths if prompt_ids[: len(path.token_ids)] == path.token_ids)
    return max(fitting, key=lambda path: len(path.token_ids), default=_Path([], [], []))


def _response(turn: HarborTurn, model: str, answer: AssistantMessage) -> Response:
    return Response(
        id="",
        created=0,
        model=model,
        message=answer,
        finish_reason="length" if turn.cut else "stop",
        usage=Usage(prompt_tokens=len(turn.prompt_ids), completion_tokens=len(turn.completion_ids)),
        tokens=TurnTokens(
            prompt_ids=list(turn.prompt_ids),
            completion_ids=list(turn.completion_ids),
            completion_logprobs=list(turn.logprobs),
        ),
    )


def _placeholder(kind: str, token_ids: list[int]) -> str:
    """Return a placeholder for a text that Harbor did not record; equal tokens give equal placeholders."""
    digest = hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]
    return f"<{kind}: {len(token_ids)} tokens, {digest}>"
