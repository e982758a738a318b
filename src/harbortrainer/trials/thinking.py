"""Tells a model's thinking from its answer where the server did not.

A server without a reasoning parser gives `<think>a draft</think>the answer` as one text, and Terminus-2 runs the first
JSON in it: the draft. Contract: the answer is what stands behind the thinking, as vLLM's own parsers see it; the text
itself, which goes back to the server with the history, and the tokens are not touched.
"""

from dataclasses import replace

from harbor.llms.base import LLMResponse

OPENING, CLOSING = "<think>", "</think>"


def answer_alone(response: LLMResponse) -> LLMResponse:
    """The response with its thinking, if it stands in the content, moved to where thinking belongs."""
    thinking, answer = split_thinking(response.content)
    if not thinking and answer == response.content:
        return response
    said = [part for part in (response.reasoning_content, thinking) if part]
    return replace(response, content=answer, reasoning_content="\n".join(said) or None)


def split_thinking(content: str) -> tuple[str, str]:
    """Thinking and answer of a text.

    Templates that open the thinking themselves leave only its end in the text; an end that never came leaves no answer.
    """
    head, closed, tail = content.partition(CLOSING)
    opened = head.lstrip().startswith(OPENING)
    if not closed and not opened:
        return "", content
    return head.lstrip().removeprefix(OPENING).strip(), tail.lstrip()
