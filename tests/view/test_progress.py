"""The progress of an active run: phases, trials in flight and the remaining time."""

import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import hold_lock, run_folder, trial_row, two_steps

from harbortrainer.runs.live_status import LIVE_FILE, ActiveTrial, LiveStatus, Phase
from harbortrainer.view.progress import RunTimes, progress_of, remaining_s, run_times
from harbortrainer.view.run_config import EvalSchedule
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import Site

NO_TIMES = RunTimes(step=0, step_s=None, eval_s=0.0, evaluated=frozenset(), since_last_s=0.0)


def page_text(folder: Path, path: str = "/") -> str:
    response = TestClient(Site(open_store(folder)).app(), base_url="http://localhost").get(path)
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.text.split("<main>")[-1])).split())


def times(step: int, *, since_last_s: float = 0.0, evaluated: tuple[int, ...] = (0,)) -> RunTimes:
    return RunTimes(step=step, step_s=10.0, eval_s=30.0, evaluated=frozenset(evaluated), since_last_s=since_last_s)


@pytest.mark.parametrize(
    ("found", "intervals", "expected"),
    [
        (times(2), None, 80.0),  # 8 steps
        (times(2, since_last_s=4.0), None, 76.0),
        (times(2, since_last_s=400.0), None, 70.0),  # a slow step has not taken more than its estimate
        (times(2), (100,), 110.0),  # and the evaluation after the last step
        (times(2), (4,), 170.0),  # and those after steps 4, 8 and 10
        (times(4, evaluated=(0, 4)), (4,), 120.0),
        (times(4), (4,), 150.0),  # the evaluation of version 4 is in progress
        (times(10, since_last_s=20.0), (4,), 10.0),
        (times(10, evaluated=(0, 10)), (4,), 0.0),
    ],
)
def test_remaining_time_counts_steps_and_evaluations(found, intervals, expected: float) -> None:
    schedule = None if intervals is None else EvalSchedule(intervals)
    assert remaining_s(found, 10, schedule) == expected


def test_remaining_time_is_unknown_before_the_first_step_and_without_a_last_one() -> None:
    assert remaining_s(NO_TIMES, 10, None) is None
    assert remaining_s(times(3), None, None) is None


def test_step_takes_the_median_of_the_last_five() -> None:
    rows = [{"step": step, "time/step": took} for step, took in enumerate((900.0, 1.0, 2.0, 3.0, 4.0, 500.0), 1)]
    rows.append({"step": 6, "eval/n": 4, "time/eval": 7.0})
    assert run_times(rows, since_last_s=1.0) == RunTimes(6, 3.0, 7.0, frozenset({6}), 1.0)


def test_evaluation_of_its_own_is_extrapolated() -> None:
    live = LiveStatus(since=100.0, phases=[Phase(text="evaluating", since=110.0, done=4, total=12)])
    found = progress_of(live, NO_TIMES, max_steps=None, schedule=None, now=150.0)
    assert (found.elapsed_s, found.remaining_s) == (50.0, 80.0)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], ["starting: loading the tasks and libraries"]),
        ([Phase(text="loading the policy", since=8.0)], ["loading the policy"]),
        ([Phase(text="steps", since=8.0, done=1, total=3)], ["steps finished", "training on the batch"]),
        (
            [Phase(text="steps", since=8.0), Phase(text="step 2: sampling", since=9.0)],
            ["steps finished", "step 2: sampling"],
        ),
    ],
)
def test_phases_are_named(phases: list[Phase], expected: list[str]) -> None:
    found = progress_of(LiveStatus(since=5.0, phases=phases), NO_TIMES, max_steps=3, schedule=None, now=10.0)
    assert [phase.text for phase in found.phases] == expected


def test_overview_shows_progress_of_an_active_run_only(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    trials = [ActiveTrial(task=f"<b>slow{index}", since=1.0 + index) for index in range(14)]
    status = LiveStatus(since=1.0, phases=[Phase(text="steps", since=1.0, done=1, total=3)], trials=trials)
    (folder / LIVE_FILE).write_text(status.model_dump_json())
    assert "in flight" not in page_text(folder), "a file that a killed run left"
    hold_lock(folder)
    for path in ("/", "/live"):
        text = page_text(folder, path)
        assert "trials in flight 14" in text and "the 12 oldest <b>slow0" in text and "<b>slow12" not in text, path
        assert "steps finished 2 of 3" in text, "the metrics are ahead of the file"


def test_any_status_fits_into_the_stamp(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    (folder / "summary.json").write_text('{"status": "\\u2192 x\\r\\ny: z"}')
    client = TestClient(Site(open_store(folder)).app(), base_url="http://localhost")
    stamp = client.get("/live").headers["x-stamp"]
    assert f'data-stamp="{stamp}"' in client.get("/").text


def test_prime_rl_run_shows_its_steps(tmp_path) -> None:
    folder = tmp_path / "run"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/rl.toml").write_text("max_steps = 40\n")
    (folder / "metrics.jsonl").write_text('{"step": 7, "time/step": 9.0}\n')
    hold_lock(folder)
    (folder / ".lock").rename(folder / "configs/.lock")
    text = page_text(folder)
    assert "elapsed – remaining about 4 min 5" in text and "step 7 of 40" in text and "in flight" not in text


def test_missing_evaluation_is_advised_only_without_one(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a__1")])
    assert "Add [orchestrator.eval]" in page_text(folder)
    config = folder / "config.toml"
    config.write_text(config.read_text() + "[orchestrator.eval]\ninterval = 5\n")
    text = page_text(folder)
    assert "No evaluation has ended yet." in text and "Add [orchestrator.eval]" not in text
