"""Thinking is told from the answer by its marks alone."""

import pytest
from harbor.llms.base import LLMResponse

from harbortrainer.trials.thinking import answer_alone, split_thinking

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
def test_the_answer_is_what_stands_behind_the_thinking(content, thinking, answer):
    assert split_thinking(content) == (thinking, answer)


def test_what_the_server_split_is_kept():
    whole = LLMResponse(content=JSON, reasoning_content="thought")
    assert answer_alone(whole) is whole
    both = answer_alone(LLMResponse(content=f"<think>b</think>{JSON}", reasoning_content="a"))
    assert (both.content, both.reasoning_content) == (JSON, "a\nb")
