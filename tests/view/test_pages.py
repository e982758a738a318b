"""The pages of a run over HTTP: content, filters, errors, escaping and export."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import (
    eval_folder,
    eval_row,
    run_folder,
    trains_on_evaluated_tasks,
    trial_row,
    two_steps,
    write_rows,
)

from harbortrainer.errors import UserError
from harbortrainer.view.file_export import export_run
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import Site


def open_client(folder: Path) -> TestClient:
    return TestClient(Site(open_store(folder)).app(), base_url="http://localhost")


@pytest.fixture
def client(tmp_path) -> TestClient:
    return open_client(two_steps(tmp_path / "run"))


def page_text(response) -> str:
    """Return the visible text of a page as one line."""
    main = response.text.split("<main>")[1]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


def listed_trials(response) -> list[str]:
    return re.findall(r'<tr data-href="/trial/([^"]+)"', response.text)


def test_overview_shows_gain_with_interval(client) -> None:
    text = page_text(client.get("/"))
    # Differences 1, 1, 1, 0 over four tasks: mean 0.75, t(3) = 3.182, stderr 0.25.
    assert "+0.75 [-0.046, 1]" in text
    assert "Not significant on 4 tasks (95% CI includes 0)." in text


def test_reward_of_a_single_evaluation_is_not_called_a_gain(tmp_path) -> None:
    rows = [eval_row(f"held{task}__v0", step=0, task=f"held{task}", reward=0.5) for task in range(2)]
    text = page_text(open_client(run_folder(tmp_path / "run", rows)).get("/"))
    assert "Held-out reward 0.5" in text and "Held-out gain" not in text


def test_evaluation_of_training_tasks_is_not_called_held_out(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    assert "Held-out gain" in page_text(open_client(folder).get("/"))
    trains_on_evaluated_tasks(folder)
    for page in ("/", "/tasks", "/trials"):
        text = open_client(folder).get(page).text
        assert "held-out" not in text.lower()
        assert page != "/" or ("Evaluation gain" in text and "evaluation reward (95% CI)" in text)


def test_overview_counts_all_trials_and_excludes_ungraded_from_reward(client) -> None:
    text = page_text(client.get("/"))
    assert "Trials 13 1 not graded" in text
    assert "completed 92.3% 12" in text and "sandbox_error 7.7% 1" in text
    assert "trained 40.0% 2" in text and "no signal in its group 40.0% 2" in text and "failed 20.0% 1" in text


def test_failures_of_the_environment_server_are_trials_and_cancelled_ones_are_not(tmp_path) -> None:
    lost = trial_row("", outcome="agent_error", reward=None, advantage=None, not_trained="failed", error="no worker")
    ended = [trial_row("a__1"), lost, lost]
    cancelled = lost | {"outcome": "cancelled", "not_trained": "too old"}
    client = open_client(run_folder(tmp_path / "run", [*ended, cancelled]))
    text = page_text(client.get("/"))
    assert "Trials 3 2 not graded" in text and "failed 66.7% 2" in text and "cancelled" not in text
    listed = listed_trials(client.get("/trials?reward=none"))
    assert len(set(listed)) == 2
    assert "no worker" in page_text(client.get(f"/trial/{listed[0]}"))


def test_cost_is_shown_only_with_prices(client, tmp_path) -> None:
    assert "Cost $1.50 of the training steps" in page_text(client.get("/"))
    assert "Cost" not in page_text(open_client(run_folder(tmp_path / "free", [trial_row("a__1")])).get("/"))


def test_time_parts_are_disjoint(client) -> None:
    text = page_text(client.get("/"))
    # 25 s: 14 waiting, 4 training (5 less 1 for the check), 1 log-probability check, 5 evaluation, 1 other.
    for part in (
        "waiting for trials 56.0% 14.0 s",
        "training 16.0% 4.0 s",
        "log-probability check 4.0% 1.0 s",
        "evaluation 20.0%",
    ):
        assert part in text
    # 13 trials of 10 s each: the agent runs for 6 s, including 4 s of model time.
    assert "model 40.0% 52.0 s" in text and "agent and terminal 20.0% 26.0 s" in text


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("outcome=sandbox_error", ["sort__a3"]),
        ("reward=none", ["sort__a3"]),
        ("reward=0..0.5&kind=train", ["sort__a2"]),
        ("step=2&kind=train", ["count__b2", "count__b1"]),
        ("trained=yes&sort=reward", ["sort__a2", "sort__a1"]),
        ("trained=failed", ["sort__a3"]),
        ("task=held3&sort=-step", ["held3__v2", "held3__v0"]),
        ("group=group1&outcome=completed", ["sort__a2", "sort__a1"]),
        ("source=other", []),
    ],
)
def test_query_string_filters_trials(client, query: str, expected: list[str]) -> None:
    assert listed_trials(client.get(f"/trials?{query}")) == expected


@pytest.mark.parametrize("query", ["step=abc", "page=0", "page=x", "sort=size", "kind=both", "reward=1..0", "step=nan"])
def test_invalid_query_string_gives_400(client, query: str) -> None:
    response = client.get(f"/trials?{query}")
    assert response.status_code == 400
    assert query.split("=")[0] in page_text(response)


def test_trial_page_explains_training_decision(client) -> None:
    assert "made more likely (advantage +0.5; reward 1, group mean 0.5)" in page_text(client.get("/trial/sort__a1"))
    assert "or it has no sampled tokens" in page_text(client.get("/trial/sort__a3"))
    assert "all rewards of its group are equal" in page_text(client.get("/trial/count__b1"))
    assert "never trained on" in page_text(client.get("/trial/held0__v0"))


def test_trial_that_trained_without_advantage_was_not_made_less_likely(tmp_path) -> None:
    client = open_client(run_folder(tmp_path / "run", [trial_row("a__1", advantage=0.0)]))  # as with ECHO
    text = page_text(client.get("/trial/a__1"))
    assert "its sampled tokens were not trained on" in text and "less likely" not in text


def test_group_page_orders_trials_by_reward(client) -> None:
    response = client.get("/group/group1")
    text = page_text(response)
    assert "sort, step 1" in text and "mean reward 0.5" in text
    assert listed_trials(response) == ["sort__a1", "sort__a2", "sort__a3"]
    assert "0 -0.5 completed 2 30 10.0 s Trained on: its tokens were made less likely" in text


def test_heat_map_has_values_and_failures(client) -> None:
    response = client.get("/tasks")
    assert "sort 0.50 – 3 1 .5" in page_text(response), "mean, gain, trials, failed, and the value of its cell"
    assert re.findall(r'class="cell (h\d+(?: failed)?)"', response.text) == ["h10", "h5 failed"]
    assert "count 1.00 – 2 0 1" in page_text(response)


def test_overview_has_configuration_and_check(tmp_path) -> None:
    rows = [
        {"step": step, "time/step": 1.0, "proof/logprob_diff/max": diff, "proof/spread": spread}
        for step, diff, spread in ((1, 0.004, 0.5), (2, 0.001, 0.9))
    ]
    folder = run_folder(tmp_path / "run", [trial_row("a__1")], metrics=rows)
    (folder / "config.toml").write_text(
        'max_steps = 3\nseq_len = 512\n[model]\nname = "<b>"\n[trainer.optim]\nlr = 1e-5\n[a.env_vars]\nK = "sk-1"\n'
    )
    text = page_text(open_client(folder).get("/"))
    assert "check passed in 2 steps. Largest difference 0.004, largest spread 0.9. The run stops at a spread" in text
    assert (
        "Configuration model.name <b> max_steps 3 seq_len 512 optim.lr 1e-05 all 4 keys" in text and "sk-1" not in text
    )
    summary = {"status": "stopped", "steps": 2, "failed_check": "shift is 0.05"}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = page_text(open_client(folder).get("/"))
    assert "Check of the training data failed at step 3 shift is 0.05 2 steps passed before it." in text
    assert "check passed" not in text
    assert "Log-probability check" not in page_text(open_client(two_steps(tmp_path / "other")).get("/"))


def test_heat_map_names_the_source_of_tasks_of_one_name(tmp_path) -> None:
    rows = [
        trial_row("a", source="easy", reward=1.0),
        trial_row("b", source="hard", reward=0.0),
        trial_row("c", source="hard", task="count"),
    ]
    client = open_client(run_folder(tmp_path / "run", rows))
    response = client.get("/tasks")
    text = page_text(response)
    assert "3 tasks" in text and "sort (easy) 1.00" in text and "sort (hard) 0.00" in text and "count 1.00" in text
    for label, trials in (("sort \\(easy\\)", ["a"]), ("sort \\(hard\\)", ["b"]), ("count", ["c"])):
        links = re.findall(rf'href="([^"]+)"[^>]*>{label}<', response.text)
        links += re.findall(rf'href="([^"]+)" title="{label},', response.text)
        assert len(links) == 2
        assert [listed_trials(client.get(unescape(link))) for link in links] == [trials, trials]


def test_heat_map_cells_link_to_their_trials(client) -> None:
    response = client.get("/tasks?kind=eval&sort=gain")
    assert re.findall(r'class="cell (\w+)"', response.text) == ["h0", "h10"] * 3 + ["h10", "h10"]
    link = unescape(re.findall(r'href="(/trials\?kind=eval[^"]+step=[^"]+)"', response.text)[0])
    assert listed_trials(client.get(link)) == ["held0__v0"]


def test_unknown_path_gives_404(client) -> None:
    for path in ("/trial/nobody", "/group/none", "/group/", "/elsewhere"):
        assert client.get(path).status_code == 404, path


def test_server_refuses_writes_and_foreign_hosts(client) -> None:
    for path in ("/", "/trials", "/live"):
        assert client.post(path).status_code == 405
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_pages_have_no_external_urls(client) -> None:
    for path in ("/", "/tasks", "/trials", "/group/group1", "/trial/sort__a1", "/style.css", "/page.js"):
        assert not re.findall(r"(?:https?:)?//[a-z]", client.get(path).text), path


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\x00\u202e&amp;"


def test_hostile_text_is_escaped(tmp_path) -> None:
    row = trial_row(HOSTILE, task=HOSTILE, error=HOSTILE, group=HOSTILE, outcome=HOSTILE, not_trained=HOSTILE)
    row |= {"source": HOSTILE, "rewards": {HOSTILE: 1.0}, "steps": [{"name": HOSTILE, "outcome": HOSTILE}]}
    client = open_client(run_folder(tmp_path / "run", [row]))
    link = listed_trials(client.get("/trials"))[0]
    group = re.findall(r'href="(/group/[^"]+)"', client.get(f"/trial/{link}").text)[0]
    for path in ("/", "/tasks", "/trials", f"/trial/{link}", group):
        response = client.get(path)
        assert response.status_code == 200, path
        assert "<script>alert" not in response.text and "<img" not in response.text, path
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", response.text), path
    assert "‹ESC›[31m‹NUL›‹U+202E›" in page_text(client.get(f"/trial/{link}"))


def test_long_text_is_clipped_with_a_note(tmp_path) -> None:
    client = open_client(run_folder(tmp_path / "run", [trial_row("sort__a1", error="x" * 50_000)]))
    assert "30 000 more characters not shown" in page_text(client.get("/trial/sort__a1")).replace("\u202f", " ")


def test_active_run_is_indexed_incrementally(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    client = open_client(folder)
    stamp = client.get("/live").headers["x-stamp"]
    file = folder / "rollouts/step_3.jsonl"
    write_rows(file, [trial_row("new__c1", step=3)])
    with file.open("a") as lines:
        lines.write('{"step": 3, "trial": "half')
    assert client.get("/live").headers["x-stamp"] != stamp
    assert listed_trials(client.get("/trials?step=3")) == ["new__c1"]
    file.unlink()
    assert listed_trials(client.get("/trials?step=3")) == []


def test_run_without_trials_has_pages(tmp_path) -> None:
    client = open_client(run_folder(tmp_path / "run", [], summary=False))
    assert "No finished trials yet" in page_text(client.get("/"))
    for path in ("/tasks", "/trials"):
        assert client.get(path).status_code == 200
    assert ">incomplete<" in client.get("/").text


def test_killed_resume_is_not_shown_with_the_summary_of_an_earlier_start(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a__1")])
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "steps": 8, "wall_s": 61.0}))
    (folder / "checkpoints/step_8").mkdir(parents=True)
    client = open_client(folder)
    assert ">finished<" in client.get("/").text and "1 min 01 s" in client.get("/").text
    (folder / "checkpoints/step_9").mkdir()  # of a resume with more steps, which was killed
    assert ">incomplete<" in client.get("/").text and "1 min 01 s" not in client.get("/").text


def test_evaluation_shows_mean_reward_pass_rates_and_attempts(tmp_path) -> None:
    rows = [
        {
            "task": task,
            "task_key": f"key-{task}",
            "attempt": attempt,
            "trial": f"{task}__{attempt}",
            "outcome": "completed",
        }
        | {"reward": reward, "prompt_tokens": 5, "sampled_tokens": 7, "timings": {"total": 3.0}}
        for task, rewards in (("a", (1.0, 0.0)), ("b", (1.0, 1.0)))
        for attempt, reward in enumerate(rewards)
    ]
    client = open_client(eval_folder(tmp_path / "eval", rows))
    text = page_text(client.get("/"))
    assert "Mean reward 0.75" in text and "2 tasks, 4 graded trials" in text
    assert "pass@2 1" in text and "pass^2 0.5" in text
    assert listed_trials(client.get("/trials?reward=0")) == ["a__1"]
    assert client.get("/tasks").text.count('class="cell h10"') == 3


def test_invalid_line_is_reported_with_its_offset(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    file = folder / "rollouts/step_1.jsonl"
    original = file.read_bytes()
    file.write_bytes(b"{incomplete\n" + original)
    with pytest.raises(UserError, match=r"step_1.jsonl: the line at byte 0: is not a JSON object"):
        open_store(folder)
    file.write_bytes(original)
    client = open_client(folder)
    with file.open("ab") as lines:
        lines.write(b"[1]\n")
    assert client.get("/").status_code == 500
    assert f"the line at byte {len(original)}" in page_text(client.get("/"))


def test_undecided_trial_is_listed_but_not_in_step_metrics(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    undecided_rows = [
        trial_row("new__c1") | {"step": None, "advantage": None},
        eval_row("held9__v9", step=9) | {"step": None},
    ]
    write_rows(folder / "transcripts/pending.jsonl", undecided_rows)
    client = open_client(folder)
    assert listed_trials(client.get("/trials"))[:2] == ["held9__v9", "new__c1"]
    assert "not decided yet, because it ended after the last finished step" in page_text(client.get("/trial/new__c1"))
    text = page_text(client.get("/"))
    assert "+0.75 [-0.046, 1]" in text and "not decided yet 16.7% 1" in text
    assert "-1" not in page_text(client.get("/tasks"))
    (folder / "transcripts/pending.jsonl").unlink()
    assert client.get("/trial/new__c1").status_code == 404


def test_export_contains_the_requested_trials(tmp_path) -> None:
    store = open_store(two_steps(tmp_path / "run"))
    for only, expected in (("", ["count__b2", "count__b1"]), ("?reward=0&kind=train", ["sort__a2"]), ("task=no", [])):
        summary = export_run(store, tmp_path / "run.html", trials=2, only=only)
        text = (tmp_path / "run.html").read_text()
        assert (
            re.findall(r'<section id="trial-.*?<span class="mono faint">([^<]+)</span>\n</p></div>', text, re.DOTALL)
            == expected
        )
        assert f"{len(expected)} trial" in summary
    with pytest.raises(UserError, match="sort"):
        export_run(store, tmp_path / "run.html", trials=2, only="sort=size")
    for only, message in (("rewards=0", "did you mean 'reward'"), ("no filter", "'no filter' is not a filter")):
        with pytest.raises(UserError, match=message):
            export_run(store, tmp_path / "run.html", trials=2, only=only)


def test_export_escapes_script_and_style_end_tags(tmp_path) -> None:
    malicious = "</script></style><script>alert(1)</script>"
    store = open_store(run_folder(tmp_path / "run", [trial_row("a__1", task=malicious, error=malicious)]))
    export_run(store, tmp_path / "run.html", trials=1)
    text = (tmp_path / "run.html").read_text()
    assert text.count("</script>") == 1 and text.count("</style>") == 1


@pytest.mark.parametrize(("depth", "status"), [(100_000, 500), (900, 200), (500, 200)])
def test_deeply_nested_line_gives_a_page(tmp_path, depth: int, status: int) -> None:
    run = run_folder(tmp_path / "run", [trial_row("a__1")])
    file = run / "rollouts" / "step_1.jsonl"
    client = open_client(run)
    nested = f'{{"x": {"[" * depth}{"]" * depth}, '
    file.write_text(file.read_text() + file.read_text().replace("a__1", "b__1").replace("{", nested, 1))
    for address in ("/", "/tasks", "/trials", "/group/group1", "/trial/a__1", "/trial/b__1"):
        response = client.get(address)
        assert response.status_code == status, address
        if status == 500:
            assert f"{file}: the line at byte" in page_text(response) and "is nested too deeply" in page_text(response)
    assert client.get("/live").status_code == status
