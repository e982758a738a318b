"""The comparison of a group's trials: equal behaviour is one variant, and differences are marked."""

import json

from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view import side_by_side as module
from harbortrainer.view.side_by_side import SideTurn, marked_words, side_by_side
from harbortrainer.view.trial_view import TrialDetail, TurnDetail


def trial(reward: float | None, *answers: str) -> TrialDetail:
    row = TrialRow(trial=f"t__{id(answers)}", task="sort", outcome="completed", reward=reward, advantage=0.5, step=1)
    turns = [TurnDetail(number=number, prompt=(), answer=answer) for number, answer in enumerate(answers, 1)]
    return TrialDetail(row, turns=turns)


def terminus(*commands: str, plan: str = "", complete: bool = False) -> str:
    keystrokes = [{"keystrokes": command} for command in commands]
    return json.dumps({"plan": plan, "commands": keystrokes, "task_complete": complete})


def variants(turn: SideTurn) -> list[tuple[list[int], str, bool]]:
    return [([one.number for one in own.trials], str(own.text), own.complete) for own in turn.variants]


def test_trials_with_equal_commands_are_one_variant() -> None:
    trials = [
        trial(0.0, terminus("sort a > c\n")),
        trial(1.0, terminus("sort a > b\n", plan="sort")),
        trial(None, terminus("sort a > b\n", complete=True)),
        trial(1.0, terminus("sort a > b\n", plan="else")),
    ]
    found = side_by_side(trials)
    assert [one.number for one in found.trials] == [2, 4, 1, 3]
    expected = [
        ([2, 4], "sort a &gt; b", False),
        ([1], "sort a &gt; <mark>c</mark>", False),
        ([3], "sort a &gt; b", True),
    ]
    assert variants(found.turns[0]) == expected
    assert found.mean == 2 / 3


def test_turns_are_aligned_and_ended_trials_are_named() -> None:
    found = side_by_side([trial(1.0, terminus("a")), trial(0.0, terminus("a"), "no <format>")])
    assert variants(found.turns[0]) == [([1, 2], "a", False)] and found.turns[0].ended == []
    assert variants(found.turns[1]) == [([2], "no &lt;format&gt;", False)]
    assert [one.number for one in found.turns[1].ended] == [1]


def test_marked_text_is_escaped_and_complete() -> None:
    text = "<script>\x1b</script>\nls"
    marked = str(marked_words(text, "ls"))
    assert marked.replace("<mark>", "").replace("</mark>", "") == "&lt;script&gt;‹ESC›&lt;/script&gt;\nls"
    assert "ls</mark>" not in marked


def test_long_variants_are_compared_by_line(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_WORD_PAIRS", 3)
    assert str(marked_words("a b\nc d\n", "a x\nc d\n")) == "<mark>a b\n</mark>c d\n"


def test_turns_and_characters_are_limited() -> None:
    answers = ["x" * 2000] * 25
    found = side_by_side([trial(1.0, *answers)])
    assert (len(found.turns), found.omitted) == (20, 5)
    assert (len(found.turns[0].variants[0].text), found.turns[0].variants[0].omitted) == (1500, 500)
