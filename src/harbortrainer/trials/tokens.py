"""Token ids and log-probabilities out of a chat completion, all of them or an error.

Invariant: one log-probability for each sampled id, each a finite number, and a prompt; or nothing is returned.
"""

import math
from typing import Any

from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens


def turn_tokens(reply: dict[str, Any], *, cut: bool) -> TurnTokens:
    """Read one call's tokens as vLLM (`return_token_ids`) and the embedded sampler return them.

    Args:
        reply: The body of /v1/chat/completions.
        cut: The answer was cut at its length.

    Raises:
        TokensMissingError: Something is missing, not finite, or of another length.
    """
    choice = reply["choices"][0]
    prompt = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    completion = choice.get("token_ids")
    content = (choice.get("logprobs") or {}).get("content")
    if not prompt or completion is None or content is None:
        raise TokensMissingError("the model server returned no token ids or log-probabilities")
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(completion):
        raise TokensMissingError(f"{len(completion)} sampled tokens but {len(logprobs)} log-probabilities")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        raise TokensMissingError("a log-probability is not a finite number")
    return TurnTokens(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, cut=cut)
