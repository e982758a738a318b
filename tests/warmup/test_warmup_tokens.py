"""The warm-up's tokenizer, and its token sequences, which equal a rollout's."""

from importlib.metadata import version
from importlib.resources import files

import pytest

pytest.importorskip("torch")

from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.supervised import BasePolicy
from tiny_policy import prompts
from tiny_policy.architecture import fresh_policy
from tiny_policy.tokenizer import fixed_parts

COMMANDS = ["sort plum.txt > jade.txt", "wc -l < plum.txt > jade.txt", "tac fig.txt > ruby.txt"]


@pytest.fixture(scope="module")
def episodes() -> list[Demonstration]:
    return [prompts.episode(f"Do thing {i} to plum.txt.\n", [c]) for i, c in enumerate(COMMANDS)]


@pytest.fixture(scope="module")
def policy(episodes: list[Demonstration]) -> BasePolicy:
    return fresh_policy(episodes, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "a\n\n\n b\tc  ",
        "naïve ☃ 漢字 \U0001f600",
        '{"commands": []}',
        "\n" * 45,
        "$ ls: cannot access 'x'",
    ],
)
def test_tokenizer_round_trip(policy: BasePolicy, text: str):
    assert policy.tokenizer.decode(policy.tokenizer.encode(text, add_special_tokens=False)) == text


def test_common_text_is_one_token(policy: BasePolicy):
    lengths = [len(policy.tokenizer.encode(part, add_special_tokens=False)) for part in fixed_parts()]
    assert set(lengths) == {1}


def test_episode_is_one_short_sequence(policy: BasePolicy, episodes: list[Demonstration]):
    (sequence,) = policy.encode(episodes[0])
    assert len(sequence.ids) < 100


def test_only_answers_are_learned(policy: BasePolicy, episodes: list[Demonstration]):
    (sequence,) = policy.encode(episodes[0])
    learned = [token for token, answer in zip(sequence.ids, sequence.answer, strict=True) if answer]
    said = "".join(f"{reply}<|im_end|>" for _, reply in episodes[0])
    assert policy.tokenizer.decode(learned) == said


def test_chat_template_matches_renderer(policy: BasePolicy, episodes: list[Demonstration]):
    messages = []
    for shown, reply in episodes[0]:
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": reply}]
    by_template = policy.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    (sequence,) = policy.encode(episodes[0])
    newline = policy.tokenizer.encode("\n", add_special_tokens=False)
    assert by_template == sequence.ids + newline


def test_harbor_first_prompt_is_unchanged():
    template = files("harbor").joinpath(prompts.TEMPLATE)
    told = f"harbor {version('harbor')}: {prompts.TEMPLATE} is not what tiny_policy.prompts was written for"
    told += f" ({prompts.WRITTEN_FOR})"
    assert template.is_file(), told
    assert template.read_text().format(instruction="DO THIS", terminal_state="$ ").count("DO THIS") == 1, told


def test_confirmation_repeats_no_command():
    shown = prompts.confirmation_prompt(["sort a > b"])
    assert shown.count("sort a > b") == 1
