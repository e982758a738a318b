"""`capture = "rollout_details"`: what the agent's own calls ask for, and Harbor's record of them as a verifiers trace.

Contract: one call of the agent's is one sampled node; a prompt that extends everything the model saw and said
before goes on with that branch, any other prompt (a summary, dropped reasoning, the next step of a task)
starts or forks another. Which of a prompt's new tokens are the body of the message that the agent added is told where
the renderer, given that message, has the very tokens that the server had; without that no token is anyone's.
Invariant: fail closed. A call without ids or log-probabilities, or with lists that do not match, fails the whole trial;
nothing is guessed and nothing that trains is re-tokenized.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from renderers.base import RenderedTokens
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Message, Response, SamplingConfig, TurnTokens, Usage, UserMessage

from harbortrainer.environment.verifiers_side import SALT, Bodies, commit_call
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens as HarborTurn
from harbortrainer.trials.tokens import fault_of

# Log-probabilities mean something to the trainer only when nothing reshapes the distribution they belong to.
PLAIN_SAMPLING = {"temperature": 1.0, "top_k": -1, "min_p": 0.0}
_OPENAI_KEYS = ("top_p", "max_tokens", "seed", "stop")


@dataclass(frozen=True)
class _Path:
    """A committed answer with everything before it: its tokens, and the messages that name its nodes."""

    prompt_ids: list[int]
    completion_ids: list[int]
    messages: list[Message]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


def direct_kwargs(sampling: SamplingConfig, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Terminus-2's arguments for calls that return token ids, with the run's sampling; `own` are the user's."""
    wanted = sampling.model_dump(exclude_none=True)
    wanted = PLAIN_SAMPLING | (wanted.pop("extra_body", None) or {}) | wanted
    call = {key: wanted[key] for key in _OPENAI_KEYS if key in wanted}
    call["extra_body"] = {key: wanted[key] for key in ("top_k", "min_p", SALT) if key in wanted}
    own_call = own.get("llm_call_kwargs")
    return {
        "collect_rollout_details": True,
        "temperature": wanted["temperature"],
        "llm_call_kwargs": (own_call if isinstance(own_call, dict) else {}) | call,
    }


def commit_turns(trace: Trace, turns: list[HarborTurn], model: str, bodies: Bodies | None = None) -> None:
    """Commit the calls of a finished trial to an empty trace, in the order in which they were made.

    Args:
        trace: Nothing was sampled on it yet.
        turns: One per model call.
        model: Name of the sampled model, recorded with each call.
        bodies: Tells a message's body from the template around it.

    Raises:
        TokensMissingError: There are no turns, or one of them is incomplete; the trace is untouched.
    """
    if not turns:
        raise TokensMissingError("the server returned no token ids; it must honour return_token_ids and logprobs")
    for number, turn in enumerate(turns, start=1):
        fault = fault_of(turn.prompt_ids, turn.completion_ids, turn.logprobs)
        if fault or not turn.completion_ids:
            raise TokensMissingError(f"turn {number}: {fault or 'an answer without its ids'}")
    paths: list[_Path] = []
    for turn in turns:
        paths.append(_commit(trace, turn, model, paths, bodies))


def _commit(trace: Trace, turn: HarborTurn, model: str, paths: list[_Path], bodies: Bodies | None) -> _Path:
    before = _longest_prefix(turn.prompt_ids, paths)
    added = turn.prompt_ids[len(before.token_ids) :]
    prompt: list[Message] = [*before.messages, UserMessage(content=_name("prompt", added))]
    answer = AssistantMessage(content=_name("answer", turn.completion_ids))
    response = _response(turn, model, answer)
    if bodies is not None and response.tokens is not None:
        _attribute(response.tokens, turn, before, bodies)
    commit_call(trace, prompt, response)
    return _Path(turn.prompt_ids, turn.completion_ids, [*prompt, answer])


def _attribute(tokens: TurnTokens, turn: HarborTurn, before: _Path, bodies: Bodies) -> None:
    """Say of the tokens that this prompt adds which are the agent's message, and which its body."""
    if not before.messages or turn.asked is None:
        return
    told, start = bodies(before.prompt_ids, before.completion_ids, turn.asked), len(before.token_ids)
    if told is None or told.token_ids != turn.prompt_ids:
        return
    added = RenderedTokens(message_indices=told.message_indices[start:], message_roles=told.message_roles)
    own = [(first + start, end + start) for first, end in filter(None, added.message_token_spans())]
    if len(own) == 1:
        tokens.message_spans, tokens.is_content = [*(None for _ in before.messages), *own], list(told.is_content)


def _longest_prefix(prompt_ids: list[int], paths: list[_Path]) -> _Path:
    """The longest account of an earlier call that this prompt begins with."""
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


def _name(kind: str, token_ids: list[int]) -> str:
    """Stands for a text that Harbor did not record: equal for equal tokens, different for different ones."""
    digest = hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]
    return f"<{kind}: {len(token_ids)} tokens, {digest}>"
