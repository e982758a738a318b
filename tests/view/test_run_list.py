"""The list of runs in a folder, their comparison, and their pages below it."""

import re
import time
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import CONFIG, eval_folder, eval_row, hold_lock, run_folder, trial_row, two_steps, write_rows

from harbortrainer.commands.view_run import site_of
from harbortrainer.errors import UserError
from harbortrainer.runs.live_status import LIVE_FILE, LiveStatus


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three runs, one of them without trials, and an evaluation one level deeper."""
    outputs = tmp_path / "outputs"
    two_steps(outputs / "first")
    held_out = [
        eval_row(f"held{task}__w{step}", step=step, task=f"held{task}", reward=float(step > 0 and task != 1))
        for step in (0, 2)
        for task in range(4)
    ]
    second = run_folder(outputs / "second <b>", [trial_row("sort__z1"), *held_out])
    (second / "config.toml").write_text(CONFIG + '[trainer.optim]\nlr = 1e-4\napi_key = "sk-1"\n')
    run_folder(outputs / "empty", [], summary=False)
    row = {"task": "a", "task_key": "k", "attempt": 0, "trial": "a__0", "outcome": "completed", "reward": 0.25}
    eval_folder(outputs / "evaluations" / "base", [row])
    (outputs / "notes").mkdir()
    return outputs


@pytest.fixture
def client(folder) -> TestClient:
    return TestClient(site_of(folder).app(), base_url="http://localhost")


def page_text(response) -> str:
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.text.split("<main>")[1])).split())


def test_list_has_gain_cost_and_curve_of_each_run(client) -> None:
    response = client.get("/")
    text = page_text(response)
    assert "first org/policy finished 2 1 0.25 → 1 +0.75 [-0.046, 1] $1.50 1 min 01 s" in text
    assert "evaluations/base org/policy incomplete 0.25 [0, 0.994] 1 1" in text
    assert "empty org/policy incomplete 0 – – – –" in text
    assert (
        "notes" not in text
        and "second <b>" in text
        and "<b>" not in response.text.split("<main>")[1].split("second")[1][:9]
    )
    assert response.text.count('class="spark"') == 1, "only the first run has metrics"


def overview_time(client: TestClient, words: str) -> str:
    found = re.search(rf"{words} (\d+ min \d+ s|[\d.]+ s|–)", page_text(client.get("/run/first/")))
    return found[1] if found else "none"


def test_list_has_wall_time_of_run_page(client, folder, monkeypatch) -> None:
    def listed() -> str:
        text = page_text(client.get("/"))
        assert "cost wall time" in text and "Select two to 6 runs. The gain is" in text
        found = re.search(r"first org/policy .*? \$1.50 (\d+ min \d+ s|[\d.]+ s)", text)
        return found[1] if found else "missing"

    assert listed() == overview_time(client, "wall time") == "1 min 01 s"
    hold_lock(folder / "first")  # resumed: the summary is of the earlier start
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    (folder / "first" / LIVE_FILE).write_text(LiveStatus(since=900.0).model_dump_json())
    assert listed() == overview_time(client, "elapsed") == "1 min 40 s"
    assert overview_time(client, "wall time") == "none"
    (folder / "first" / LIVE_FILE).unlink()
    assert listed() == "25.0 s", "its finished steps and evaluations"


def test_pages_of_a_run_link_below_its_address(client) -> None:
    for name in ("first", "second%20%3Cb%3E", "evaluations/base", "empty"):
        for page in ("", "tasks", "trials"):
            response = client.get(f"/run/{name}/{page}")
            assert response.status_code == 200
            links = re.findall(r'(?:href|action|data-live|data-href)="(/[^"]*)"', response.text)
            outside = [link for link in links if not link.startswith(f"/run/{name}/")]
            assert outside in (["/style.css", "/"], ["/style.css", "/", "/"]), "the assets and the list"
    assert client.get("/run/first/trial/sort__a1").status_code == 200
    assert client.get("/run/first/live").headers["x-stamp"]


@pytest.mark.parametrize(
    "path", ["/run/nobody/", "/run/notes/", "/run/..%2f..%2fetc/", "/run/first/trial/none", "/run/", "/else"]
)
def test_unknown_addresses_give_404(client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_comparison_overlays_runs_and_lists_config_differences(client) -> None:
    response = client.get("/compare?run=first&run=second+%3Cb%3E")
    text = page_text(response)
    assert 'class="curve c1"' in response.text and 'class="big c2"' in response.text
    # The last evaluations are 1, 1, 1, 1 and 1, 0, 1, 1: differences 0, -1, 0, 0.
    assert "-0.25 [-1, 0.546] 4 tasks" in text
    assert "trainer.optim.lr – 0.0001" in text
    assert "model.name" not in text and "sk-1" not in text and "api_key" not in text


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("run=first", "1 runs are selected"),
        ("run=first&run=nobody", "there is no run 'nobody'"),
        ("", "0 runs are selected"),
    ],
)
def test_comparison_of_wrong_runs_gives_400(client, query: str, expected: str) -> None:
    response = client.get(f"/compare?{query}")
    assert response.status_code == 400 and expected in unescape(response.text)


def test_list_follows_new_and_removed_runs(client, folder) -> None:
    stamp = client.get("/live").headers["x-stamp"]
    assert client.get("/live").headers["x-stamp"] == stamp
    assert f'data-stamp="{stamp}"' in client.get("/").text
    write_rows(folder / "empty" / "rollouts/step_1.jsonl", [trial_row("new__1")])
    changed = client.get("/live").headers["x-stamp"]
    run_folder(folder / "third", [trial_row("a__1")])
    assert len({stamp, changed, client.get("/live").headers["x-stamp"]}) == 3
    assert "third org/policy" in page_text(client.get("/"))


def test_unreadable_run_is_a_line_with_its_error(client, folder) -> None:
    (folder / "first/rollouts/step_1.jsonl").write_text("[1]\n")
    text = page_text(client.get("/"))
    assert "step_1.jsonl: the line at byte 0: is not a JSON object" in text and "second <b>" in text
    assert client.get("/run/first/").status_code == 500


def test_list_refuses_writes_and_foreign_hosts(client) -> None:
    for path in ("/", "/compare", "/live", "/run/first/"):
        assert client.post(path).status_code == 405, path
        assert client.get(path, headers={"host": "evil.example"}).status_code == 400, path
    assert "unsafe" not in client.get("/").headers["content-security-policy"]


def test_folder_without_runs_is_refused(tmp_path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(UserError, match="contains no run or evaluation"):
        site_of(tmp_path)
