"""A report separates graded and lost trials."""

import pytest
from eval_folders import LOST, eval_spec, row, rows_of
from verifiers.v1.episode import WireEpisode

from harbortrainer.estimates.interval import mean_reward
from harbortrainer.evaluation.measuring import attempts_left, completed_row
from harbortrainer.evaluation.report import EvalReport, Prices, as_lines, as_markdown

pytestmark = pytest.mark.process

REWARDS = {"a": [1.0, LOST, 1.0], "b": [0.0, 0.0, 1.0], "c": [LOST, LOST, LOST], "d": [0.0, 0.0]}
TAGS = {"key-a": ["bash"], "key-b": ["bash", "category:git"], "key-c": ["lost"], "key-d": []}


@pytest.fixture
def report() -> EvalReport:
    return EvalReport.of(eval_spec(list(REWARDS), attempts=3), rows_of(REWARDS), tags=TAGS)


def test_lost_trial_is_not_a_reward_of_0(report: EvalReport) -> None:
    graded = {"a": [1.0, 1.0], "b": [0.0, 0.0, 1.0], "d": [0.0, 0.0]}
    assert report.mean == mean_reward(graded)
    assert (report.mean.tasks, report.mean.attempts) == (3, 7)
    assert (report.lost, report.missing) == ({"sandbox_error": 4}, 1)
    assert report.outcomes == {"completed": 7, "sandbox_error": 4}
    assert report.by_task["key-c"].mean_reward is None
    text = "\n".join(as_lines(report))
    assert "4 lost and not counted (sandbox_error 4)" in text and "1 task without a graded trial" in text
    assert "1 not run yet" in text


def test_metrics_by_tag(report: EvalReport) -> None:
    assert list(report.by_tag) == ["bash", "category:git"]
    assert report.by_tag["bash"] == mean_reward({"a": [1.0, 1.0], "b": [0.0, 0.0, 1.0]})


def test_lists_hardest_tasks_first(report: EvalReport) -> None:
    tasks = [line.split()[-1] for line in as_lines(report)[-4:]]
    assert tasks == ["c", "d", "b", "a"]
    assert "| c | 0 | 3 | 0 | none |" in as_markdown(report) and "| category:git | 1 |" in as_markdown(report)


def test_equal_content_is_one_task() -> None:
    """Its attempts were played twice, and then k trials were missing for ever."""
    twins = eval_spec(["a"], attempts=2).model_copy(update={"tasks": {"a": "key-a", "copy": "key-a"}})
    report = EvalReport.of(twins, rows_of({"a": [1.0, 0.0]}))
    assert (report.tasks, report.missing, report.mean.tasks, report.mean.attempts) == (1, 0, 1, 2)
    assert [(trial.index, trial.number) for trial in attempts_left(twins.keys, 2, set())] == [(0, 0), (0, 1)]


def test_measured_rates_exclude_ungraded_tasks(report: EvalReport) -> None:
    rates = report.rates().tasks
    assert {key: (rate.attempts, rate.pass_rate) for key, rate in rates.items()} == {
        "key-a": (2, 1.0),
        "key-b": (3, pytest.approx(1 / 3)),
        "key-d": (2, 0.0),
    }


def test_partial_reward_is_no_pass() -> None:
    report = EvalReport.of(eval_spec(["a"]), rows_of({"a": [0.5, 1.0]}))
    rate = report.rates().tasks["key-a"]
    assert (rate.pass_rate, rate.mean_reward, report.passes) == (0.5, 0.75, [])


def test_prompt_tokens_include_cached_tokens() -> None:
    """verifiers' `prompt_tokens` exclude cached tokens."""
    usage = {"prompt_tokens": 20, "cached_input_tokens": 80, "completion_tokens": 5}
    task = {"type": "T", "data": {"name": "a"}, "key": "key-a"}
    trace = {"id": "t", "task": task, "agent": {"config": {}}, "nodes": [], "ok": True, "calls": [{"usage": usage}] * 2}
    episode = WireEpisode.model_validate({"task": task, "ok": True, "traces": [trace]})
    ended = completed_row(row("a", 0, LOST), episode, seconds=1.0)
    assert (ended.prompt_tokens, ended.sampled_tokens) == (200, 10)


def test_tokens_and_cost_cover_all_trials() -> None:
    rows = [
        row("a", 0, 1.0, turns=2, prompt_tokens=3_000_000, sampled_tokens=500_000, timings={"total": 2.0}),
        row("a", 1, LOST, turns=8, prompt_tokens=1_000_000, sampled_tokens=500_000, timings={"total": 50.0}),
    ]
    report = EvalReport.of(eval_spec(["a"]), rows, prices=Prices(prompt=0.5, sampled=2.0))
    assert (report.turns, report.seconds) == (2.0, {"total": 2.0})
    assert (report.prompt_tokens, report.sampled_tokens, report.cost_usd) == (4_000_000, 1_000_000, 4.0)
    assert "4.0000 USD" in "\n".join(as_lines(report))
    assert EvalReport.of(eval_spec(["a"]), rows).cost_usd is None
    repeated = EvalReport.of(eval_spec(["a"]), rows[:1], prices=Prices(prompt=0.5, sampled=2.0), all_rows=rows)
    assert (repeated.cost_usd, repeated.outcomes) == (4.0, {"completed": 1})
    assert "2000000 prompt and 500000 sampled tokens" in "\n".join(as_lines(repeated)), "a trial's, not an attempt's"


def test_report_without_graded_trials() -> None:
    report = EvalReport.of(eval_spec(["a"]), rows_of({"a": [LOST, LOST]}))
    assert (report.mean.mean, report.turns, report.passes) == (None, None, [])
    assert "none" in as_lines(report)[2]


def test_report_round_trip(report: EvalReport) -> None:
    assert EvalReport.model_validate_json(report.model_dump_json()) == report
