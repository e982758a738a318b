"""Harbor's own record of the sampled tokens, made into a verifiers trace (`capture = "rollout_details"`).

Contract: one call of the agent's is one sampled node; a prompt that extends everything the model saw and said
before goes on with that branch, any other prompt (a summary, dropped reasoning, the next step of a task)
starts or forks another. Invariant: fail closed. A call without ids or log-probabilities, or with lists that
do not match, fails the whole trial; nothing is guessed and nothing is re-tokenized.
"""

import hashlib
import math
from dataclasses import dataclass

from verifiers.v1 import graph
from verifiers.v1.trace import ModelCall, Trace
from verifiers.v1.types import AssistantMessage, Message, Response, TurnTokens, Usage, UserMessage

from harbortrainer.trials.record import TurnTokens as HarborTurn


class TokensMissingError(Exception):
    """What Harbor recorded is not a complete account of what was sampled."""


@dataclass(frozen=True)
class _Path:
    """A committed answer with everything before it: its tokens, and the messages that name its nodes."""

    token_ids: list[int]
    messages: list[Message]


def commit_turns(trace: Trace, turns: list[HarborTurn], model: str) -> None:
    """Commit the calls of a finished trial to an empty trace, in the order in which they were made.

    Args:
        trace: Nothing was sampled on it yet.
        turns: One per model call.
        model: Name of the sampled model, recorded with each call.

    Raises:
        TokensMissingError: There are no turns, or one of them is incomplete; the trace is untouched.
    """
    if not turns:
        raise TokensMissingError("the server returned no token ids; it must honour return_token_ids and logprobs")
    for number, turn in enumerate(turns, start=1):
        _check(number, turn)
    paths: list[_Path] = []
    for turn in turns:
        paths.append(_commit(trace, turn, model, paths))


def _check(number: int, turn: HarborTurn) -> None:
    if not turn.prompt_ids or not turn.completion_ids:
        raise TokensMissingError(
            f"turn {number} came without its {'prompt' if turn.completion_ids else 'answer'}'s ids"
        )
    if len(turn.logprobs) != len(turn.completion_ids):
        raise TokensMissingError(
            f"turn {number} has {len(turn.completion_ids)} sampled tokens, but {len(turn.logprobs)} log-probabilities"
        )
    if not all(math.isfinite(logprob) for logprob in turn.logprobs):
        raise TokensMissingError(f"turn {number} has a log-probability that is not a finite number")


def _commit(trace: Trace, turn: HarborTurn, model: str, paths: list[_Path]) -> _Path:
    before = _longest_prefix(turn.prompt_ids, paths)
    added = turn.prompt_ids[len(before.token_ids) :]
    prompt: list[Message] = [*before.messages, UserMessage(content=_name("prompt", added))]
    answer = AssistantMessage(content=_name("answer", turn.completion_ids))
    response = _response(turn, model, answer)
    node = graph.prepare_turn(trace, prompt).commit(response)
    trace.calls.append(ModelCall(node=node, model=model, finish_reason=response.finish_reason, usage=response.usage))
    return _Path(turn.prompt_ids + turn.completion_ids, [*prompt, answer])


def _longest_prefix(prompt_ids: list[int], paths: list[_Path]) -> _Path:
    """The longest account of an earlier call that this prompt begins with."""
    fitting = (path for path in paths if prompt_ids[: len(path.token_ids)] == path.token_ids)
    return max(fitting, key=lambda path: len(path.token_ids), default=_Path([], []))


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
