"""The warm-up's tokenizer and its token sequences: exact, short, and those of a rollout."""

import pytest

pytest.importorskip("torch")

from harbortrainer.warmup import transcripts
from harbortrainer.warmup.encoding import collate
from harbortrainer.warmup.pupil import Pupil, fresh
from harbortrainer.warmup.tokenizer import fixed_parts
from harbortrainer.warmup.transcripts import Transcript, transcript

COMMANDS = ["sort plum.txt > jade.txt", "wc -l < plum.txt > jade.txt", "tac fig.txt > ruby.txt"]


@pytest.fixture(scope="module")
def episodes() -> list[Transcript]:
    return [transcript(f"k{i}", f"Do thing {i} to plum.txt.\n", [c]) for i, c in enumerate(COMMANDS)]


@pytest.fixture(scope="module")
def pupil(episodes: list[Transcript]) -> Pupil:
    return fresh(episodes, seed=0)


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
def test_any_text_survives_the_round_trip(pupil: Pupil, text: str):
    assert pupil.tokenizer.decode(pupil.tokenizer.encode(text, add_special_tokens=False)) == text


def test_what_is_the_same_in_every_episode_is_one_token(pupil: Pupil):
    lengths = [len(pupil.tokenizer.encode(part, add_special_tokens=False)) for part in fixed_parts()]
    assert set(lengths) == {1}


def test_an_episode_is_one_short_sequence(pupil: Pupil, episodes: list[Transcript]):
    (sequence,) = pupil.encode(episodes[0])
    assert len(sequence.ids) < 100


def test_only_the_answers_are_learned(pupil: Pupil, episodes: list[Transcript]):
    (sequence,) = pupil.encode(episodes[0])
    learned = [token for token, answer in zip(sequence.ids, sequence.answer, strict=True) if answer]
    said = "".join(f"{reply}<|im_end|>" for _, reply in episodes[0].turns)
    assert pupil.tokenizer.decode(learned) == said


def test_the_chat_template_renders_the_same_tokens_as_the_renderer(pupil: Pupil, episodes: list[Transcript]):
    messages = []
    for shown, reply in episodes[0].turns:
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": reply}]
    by_template = pupil.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    (sequence,) = pupil.encode(episodes[0])
    newline = pupil.tokenizer.encode("\n", add_special_tokens=False)
    assert by_template == sequence.ids + newline


def test_a_batch_learns_nothing_from_its_padding(pupil: Pupil, episodes: list[Transcript]):
    rows = [pupil.encode(episode)[0] for episode in episodes]
    ids, attention, labels = collate(rows, pad=pupil.tokenizer.pad_token_id)
    assert ids.shape == attention.shape == labels.shape == (3, max(len(row.ids) for row in rows))
    assert (labels[attention == 0] == -100).all()
    assert int((labels != -100).sum()) == sum(sum(row.answer) for row in rows)


def test_a_confirmation_names_no_command_twice():
    shown = transcripts.confirmation_prompt(["sort a > b"])
    assert shown.count("sort a > b") == 1
