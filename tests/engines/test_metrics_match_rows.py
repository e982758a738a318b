"""Metrics of a step, recomputed from the rows of its trials by independent code."""

import asyncio
import json
import math
from collections import Counter, defaultdict

import pytest
from scripted_run import GROUP, TASKS, FakeComponents, ScriptedRun
from verifiers.v1.episode import WireEpisode

from harbortrainer.engines.local.sampler.completion_log import Completion
from harbortrainer.trials.outcome import Outcome

pytestmark = pytest.mark.torch  # the weight update

COMPARED = ("no signal in its group", "its reward is its group's mean")
ALL, EFFECTIVE = "train/agg/all", "train/agg/effective"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScriptedRun:
    """Six steps on tasks with unequal, equal, mostly failed, old and truncated trials."""
    run = ScriptedRun(tmp_path_factory.mktemp("runs"), steps=6)
    asyncio.run(run.train())
    return run


def steps(run: ScriptedRun) -> list[tuple[dict, list[dict]]]:
    """Return each step's metrics and the rows of its trials."""
    metrics = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    return [
        (
            line,
            [json.loads(row) for row in (run.folder.rollouts / f"step_{line['step']}.jsonl").read_text().splitlines()],
        )
        for line in metrics
    ]


def distribution(name: str, values: list[float]) -> dict[str, float]:
    """Return mean, extrema and two deciles."""
    ordered = sorted(values)

    def decile(share: float) -> float:
        rank = share * (len(ordered) - 1)
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        return low + (rank - math.floor(rank)) * (high - low)

    mean = sum(values) / len(values)
    stats = {"mean": mean, "min": ordered[0], "max": ordered[-1], "p10": decile(0.1), "p90": decile(0.9)}
    return {f"{name}/{key}": value for key, value in stats.items()}


def subset_metrics(prefix: str, rows: list[dict]) -> dict[str, float]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    out = distribution(f"{prefix}/agent/reward", rewards)
    for kind in ("input", "output", "total"):
        out |= distribution(f"{prefix}/num_{kind}_tokens", [row["tokens"][kind] for row in rows])
    for kind in ("turns", "branches"):
        out |= distribution(f"{prefix}/num_{kind}", [row[kind] for row in rows])
    return out | {f"{prefix}/agent/is_truncated/mean": sum(row["truncated"] for row in rows) / len(rows)}


def solved_shares(rows: list[dict]) -> dict[str, float]:
    groups = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            groups[row["group"]].append(row["reward"])
    no_trial = sum(set(rewards) == {0.0} for rewards in groups.values()) / len(groups)
    all_trials = sum(set(rewards) == {1.0} for rewards in groups.values()) / len(groups)
    names = ("solved_none", "solved_all", "solved_some")
    return {
        f"{ALL}/agent/{name}": share
        for name, share in zip(names, (no_trial, all_trials, 1 - no_trial - all_trials), strict=True)
    }


def expected_metrics(step: int, rows: list[dict]) -> dict[str, float]:
    """Return the metrics of a step that follow from its rows."""
    returned = [row for row in rows if row["outcome"] != "cancelled"]
    trained = [row for row in rows if row["not_trained"] is None]
    outcomes = Counter(row["outcome"] for row in returned)
    ages = [step - 1 - row["version"] for row in trained]
    used = [row for row in rows if row["not_trained"] in (None, *COMPARED)]
    pruned = [row for row in rows if row["not_trained"] in COMPARED]
    return {
        **subset_metrics(ALL, returned),
        **subset_metrics(EFFECTIVE, trained),
        **{f"{ALL}/agent/metrics/outcome_{name}/mean": outcomes[name] / len(returned) for name in Outcome},
        **solved_shares(rows),
        f"{ALL}/has_error/mean": sum(row["outcome"] == "sandbox_error" for row in returned) / len(returned),
        "off_policy/mean": sum(ages) / len(ages),
        "off_policy/max": max(ages),
        "samples/trained": len(trained),
        "samples/pruned": len(pruned),
        "samples/truncated": sum(row["cut"]["samples"] for row in returned),
        "tokens/wasted": 1
        - sum(row["tokens"]["output"] for row in used) / sum(row["tokens"]["output"] for row in rows),
        "batch/refills": len(rows) - GROUP * len({row["group"] for row in rows}),
        "tokens/truncated": sum(row["cut"]["tokens"] for row in returned),
        "progress/rollouts": len(returned),
        "progress/trained": len(trained),
        "progress/tokens": sum(row["tokens"]["total"] for row in returned),
        "progress/input_tokens": sum(row["tokens"]["input"] for row in trained),
        "progress/output_tokens": sum(row["tokens"]["output"] for row in trained),
        "progress/tasks": len({row["task_key"] for row in returned}),
        "progress/server_restarts": 2.0,
    }


def test_metrics_match_rows(run):
    for line, rows in steps(run):
        expected = expected_metrics(line["step"], rows)
        assert {name: line[name] for name in expected} == pytest.approx(expected)
        unchecked = {name for name in line.keys() - expected.keys() if not name.startswith(("time/", "perf/"))}
        assert unchecked <= {
            *("step", "off_policy/dropped", "batch/empty", "progress/total_tokens", "progress/total_rollouts"),
            "sampler/tokens",
            "curriculum/scripted/admission_rate",
        }


class RetriedTrials(FakeComponents):
    """Each trial is a second attempt; the first one sampled three tokens."""

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        first = f"first-{index}-{self.started[index]}"
        self.completion_log.add(Completion(first, first, 2, (7, 8, 9), (-0.5,) * 3, 0))
        return await super().run(index, seed=seed)


def test_wasted_tokens_include_failed_attempts(tmp_path):
    run = ScriptedRun(tmp_path, steps=3, components=RetriedTrials())
    asyncio.run(run.train())
    discarded = []
    for line, rows in steps(run):
        used = sum(row["tokens"]["output"] for row in rows if row["not_trained"] in (None, *COMPARED))
        discarded.append(used / (1 - line["tokens/wasted"]) - sum(row["tokens"]["output"] for row in rows))
    assert all(count / 3 == pytest.approx(round(count / 3), abs=1e-6) for count in discarded)
    assert 0 < sum(discarded) <= run.components.completion_log.discarded_tokens + 1e-6, "each token in one step only"


def test_rows_have_trials_and_drop_reasons(run):
    reasons = defaultdict(Counter)
    for _, rows in steps(run):
        for row in rows:
            reasons[row["task"]][row["not_trained"]] += 1
    for task in ("signal", "equal", "long"):
        reasons[task].pop("too old", None)  # on a busy machine any trial can become too old
    assert set(reasons["signal"]) == {None, "failed", "its reward is its group's mean"}
    assert set(reasons["equal"]) == {"no signal in its group"}
    assert set(reasons["lost"]) == {"failed", "too few survivors"}
    assert set(reasons["old"]) == {"too old"}
    # None of the rewards 2.0, -1.0, 0.0 and 0.25 is their mean.
    assert set(reasons["long"]) == {None}


def tasks_of_groups(rows: list[dict]) -> dict[str, set[str]]:
    tasks = defaultdict(set)
    for row in rows:
        tasks[row["group"]].add(row["task_key"])
    return tasks


def test_counts_each_trial_once(run):
    rows = [row for _, step_rows in steps(run) for row in step_rows]
    assert len({row["trial"] for row in rows}) == len(rows)
    assert set(Counter(row["group"] for row in rows).values()) == {GROUP, GROUP + 1}, "and a refill"
    assert {len(tasks) for tasks in tasks_of_groups(rows).values()} == {1}
    assert None not in {row["group"] for row in rows}
    assert steps(run)[-1][0]["progress/total_rollouts"] == len(rows)


def test_step_reward_covers_all_returned_trials(run):
    """The batch alone would leave out tasks whose rewards are all equal."""
    rows = [row for _, step_rows in steps(run) for row in step_rows]
    tasks = {row["task"] for row in rows}
    assert tasks == {task.name for task in TASKS}
    line, rows = next((line, rows) for line, rows in steps(run) if any(row["task"] == "equal" for row in rows))
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    assert line[f"{ALL}/agent/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert line[f"{ALL}/agent/reward/mean"] != pytest.approx(line[f"{EFFECTIVE}/agent/reward/mean"])


def test_counts_truncation(run):
    lines = [line for line, rows in steps(run) if any(row["task"] == "long" for row in rows)]
    assert all(line["samples/truncated"] == 4 * (line["samples/truncated"] // 4) > 0 for line in lines)
    assert all(line["tokens/truncated"] > 0 for line in lines)


def test_dropped_equals_old_trials(run):
    for line, rows in steps(run):
        old = {row["group"] for row in rows if row["not_trained"] == "too old"}
        assert line["off_policy/dropped"] == sum(row["group"] in old for row in rows)


def test_rescores_before_training_and_before_weight_update(run):
    versions = [version for step in range(len(run.components.trained)) for version in (step, step)]
    assert run.components.rescored_versions == versions, "before each step and before each weight update"
    assert run.components.rescored == [[1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
