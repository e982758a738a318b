"""Thinking is separated from the answer by its tags."""

import pytest
from harbor.llms.base import LLMResponse

from harbortrainer.trials.agent import separate_thinking, split_thinking

JSON = '{"commands": []}'


@pytest.mark.parametrize(
    ("content", "thinking", "answer"),
    [
        (JSON, "", JSON),
        ("no marks", "", "no marks"),
        ("", "", ""),
        (f"<think>{{draft}}</think>{JSON}", "{draft}", JSON),
        (f"\n<think>\n{{draft}}\n</think>\n\n{JSON}\n", "{draft}", f"{JSON}\n"),
        (f"{{draft}}</think>{JSON}", "{draft}", JSON),
        ("<think>{draft} and no end", "{draft} and no end", ""),
        (f"<think></think>{JSON}", "", JSON),
        (f"{JSON} <think>", "", f"{JSON} <think>"),
    ],
)
def test_answer_is_the_text_after_thinking(content, thinking, answer):
    assert split_thinking(content) == (thinking, answer)


def test_reasoning_split_by_server_is_kept():
    whole = LLMResponse(content=JSON, reasoning_content="thought")
    assert separate_thinking(whole) is whole
    both = separate_thinking(LLMResponse(content=f"<think>b</think>{JSON}", reasoning_content="a"))
    assert (both.content, both.reasoning_content) == (JSON, "a\nb")
