"""The pages of a run: what they say is what its files say, by address, and nothing else is let in."""

import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import eval_folder, eval_row, run_folder, trial_row, two_steps, write_rows

from harbortrainer.errors import UserError
from harbortrainer.view.file_export import export_run
from harbortrainer.view.folder_kind import open_store
from harbortrainer.view.web_app import Site


def client_of(folder: Path) -> TestClient:
    return TestClient(Site(open_store(folder)).app(), base_url="http://localhost")


@pytest.fixture
def pages(tmp_path) -> TestClient:
    return client_of(two_steps(tmp_path / "run"))


def words_of(answer) -> str:
    """The text of a page, on one line."""
    inside = answer.text.split("<main>")[1]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", inside)).split())


def trials_of(answer) -> list[str]:
    return re.findall(r'<tr data-href="/trial/([^"]+)"', answer.text)


def test_the_overview_tells_the_gain_with_its_interval(pages) -> None:
    words = words_of(pages.get("/"))
    # Differences 1, 1, 1, 0 over four tasks: mean 0.75, t(3) = 3.182, stderr 0.25.
    assert "+0.75 [-0.046, 1]" in words
    assert "Not shown: on 4 tasks the 95 % interval holds 0." in words


def test_the_overview_counts_every_trial_and_leaves_the_lost_ones_out_of_the_reward(pages) -> None:
    words = words_of(pages.get("/"))
    assert "Trials 13 1 without a reward" in words
    assert "completed 92.3 % 12" in words and "sandbox_error 7.7 % 1" in words
    assert "trained 40.0 % 2" in words and "no signal in its group 40.0 % 2" in words and "failed 20.0 % 1" in words


def test_what_a_run_cost_is_shown_where_prices_are_set(pages, tmp_path) -> None:
    assert "Cost $1.50" in words_of(pages.get("/"))
    assert "Cost" not in words_of(client_of(run_folder(tmp_path / "free", [trial_row("a__1")])).get("/"))


def test_the_time_of_the_run_is_cut_so_that_no_second_counts_twice(pages) -> None:
    words = words_of(pages.get("/"))
    # 25 s: 14 waiting, 4 training (1 of the 5 is the proof's), 1 proof, 5 evaluation, 1 the rest.
    for said in ("waiting for trials 56.0 % 14.0 s", "training 16.0 % 4.0 s", "proof 4.0 % 1.0 s", "evaluation 20.0 %"):
        assert said in words
    # 13 trials of 10 s: 4 of the agent's 6 are the model's.
    assert "model 40.0 % 52.0 s" in words and "terminal and agent 20.0 % 26.0 s" in words


@pytest.mark.parametrize(
    ("query", "found"),
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
def test_an_address_says_which_trials_are_shown(pages, query: str, found: list[str]) -> None:
    assert trials_of(pages.get(f"/trials?{query}")) == found


@pytest.mark.parametrize("query", ["step=abc", "page=0", "page=x", "sort=size", "kind=both", "reward=1..0", "step=nan"])
def test_an_address_that_means_nothing_is_told_so(pages, query: str) -> None:
    answer = pages.get(f"/trials?{query}")
    assert answer.status_code == 400
    assert query.split("=")[0] in words_of(answer)


def test_a_trial_says_why_it_trained_or_not(pages) -> None:
    assert "made more likely, by an advantage of +0.5 (1 against its group's mean of 0.5)" in words_of(
        pages.get("/trial/sort__a1")
    )
    assert "no token of it was sampled" in words_of(pages.get("/trial/sort__a3"))
    assert "every reward of its group was the same" in words_of(pages.get("/trial/count__b1"))
    assert "never trains" in words_of(pages.get("/trial/held0__v0"))


def test_a_group_stands_side_by_side_the_best_first(pages) -> None:
    words = words_of(pages.get("/group/group1"))
    assert "mean reward 0.5" in words
    assert words.index("a1") < words.index("a2") < words.index("a3")


def test_the_map_of_tasks_leads_to_the_trials_of_each_cell(pages) -> None:
    answer = pages.get("/tasks?kind=eval&sort=gain")
    assert re.findall(r'class="cell (\w+)"', answer.text) == ["h0", "h10"] * 3 + ["h10", "h10"]
    link = unescape(re.findall(r'href="(/trials\?kind=eval[^"]+step=[^"]+)"', answer.text)[0])
    assert trials_of(pages.get(link)) == ["held0__v0"]


def test_what_is_not_there_is_not_found(pages) -> None:
    for address in ("/trial/nobody", "/group/none", "/group/", "/elsewhere"):
        assert pages.get(address).status_code == 404, address


def test_nothing_can_be_changed_and_nobody_elsewhere_reads_along(pages) -> None:
    for address in ("/", "/trials", "/stamp"):
        assert pages.post(address).status_code == 405
    assert pages.get("/", headers={"host": "evil.example"}).status_code == 400
    policy = pages.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_no_page_names_anything_elsewhere(pages) -> None:
    for address in ("/", "/tasks", "/trials", "/group/group1", "/trial/sort__a1", "/style.css", "/page.js"):
        assert not re.findall(r"(?:https?:)?//[a-z]", pages.get(address).text), address


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\x00\u202e&amp;"


def test_what_a_model_or_a_task_wrote_is_text_and_nothing_else(tmp_path) -> None:
    row = trial_row(HOSTILE, task=HOSTILE, error=HOSTILE, group=HOSTILE, outcome=HOSTILE, not_trained=HOSTILE)
    row |= {"source": HOSTILE, "rewards": {HOSTILE: 1.0}, "steps": [{"name": HOSTILE, "outcome": HOSTILE}]}
    pages = client_of(run_folder(tmp_path / "run", [row]))
    link = trials_of(pages.get("/trials"))[0]
    group = re.findall(r'href="(/group/[^"]+)"', pages.get(f"/trial/{link}").text)[0]
    for address in ("/", "/tasks", "/trials", f"/trial/{link}", group):
        answer = pages.get(address)
        assert answer.status_code == 200, address
        assert "<script>alert" not in answer.text and "<img" not in answer.text, address
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", answer.text), address
    assert "‹ESC›[31m‹NUL›‹U+202E›" in words_of(pages.get(f"/trial/{link}"))


def test_a_very_long_text_is_cut_and_says_so(tmp_path) -> None:
    pages = client_of(run_folder(tmp_path / "run", [trial_row("sort__a1", error="x" * 50_000)]))
    assert "30 000 more characters not shown" in words_of(pages.get("/trial/sort__a1")).replace("\u202f", " ")


def test_a_run_that_goes_on_is_read_on(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    pages = client_of(folder)
    stamp = pages.get("/stamp").text
    file = folder / "rollouts/step_3.jsonl"
    write_rows(file, [trial_row("new__c1", step=3)])
    with file.open("a") as torn:
        torn.write('{"step": 3, "trial": "half')
    assert pages.get("/stamp").text != stamp
    assert trials_of(pages.get("/trials?step=3")) == ["new__c1"]
    file.unlink()
    assert trials_of(pages.get("/trials?step=3")) == []


def test_a_run_without_a_trial_has_its_pages(tmp_path) -> None:
    pages = client_of(run_folder(tmp_path / "run", [], summary=False))
    assert "No trial has ended yet" in words_of(pages.get("/"))
    for address in ("/tasks", "/trials"):
        assert pages.get(address).status_code == 200
    assert ">cut off<" in pages.get("/").text


def test_an_evaluation_has_its_mean_its_passes_and_its_attempts(tmp_path) -> None:
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
    pages = client_of(eval_folder(tmp_path / "eval", rows))
    words = words_of(pages.get("/"))
    assert "Mean reward 0.75" in words and "2 tasks, 4 graded trials" in words
    assert "pass@2 1" in words and "pass^2 0.5" in words
    assert trials_of(pages.get("/trials?reward=0")) == ["a__1"]
    assert pages.get("/tasks").text.count('class="cell h10"') == 3


def test_a_line_that_cannot_be_read_is_named(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    file = folder / "rollouts/step_1.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"{torn\n" + whole)
    with pytest.raises(UserError, match=r"step_1.jsonl: the line at byte 0: cannot be read"):
        open_store(folder)
    file.write_bytes(whole)
    pages = client_of(folder)
    with file.open("ab") as broken:
        broken.write(b"[1]\n")
    assert pages.get("/").status_code == 500
    assert f"the line at byte {len(whole)}" in words_of(pages.get("/"))


def test_a_trial_of_no_step_yet_is_shown_and_is_in_no_figure_of_steps(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    open_rows = [
        trial_row("new__c1") | {"step": None, "advantage": None},
        eval_row("held9__v9", step=9) | {"step": None},
    ]
    write_rows(folder / "transcripts/pending.jsonl", open_rows)
    pages = client_of(folder)
    assert trials_of(pages.get("/trials"))[:2] == ["held9__v9", "new__c1"]
    assert "what becomes of it is still open" in words_of(pages.get("/trial/new__c1"))
    words = words_of(pages.get("/"))
    assert "+0.75 [-0.046, 1]" in words and "not decided yet 16.7 % 1" in words
    assert "-1" not in words_of(pages.get("/tasks"))
    (folder / "transcripts/pending.jsonl").unlink()
    assert pages.get("/trial/new__c1").status_code == 404


def test_one_file_holds_the_trials_that_are_asked_for(tmp_path) -> None:
    store = open_store(two_steps(tmp_path / "run"))
    for only, found in (("", ["count__b2", "count__b1"]), ("?reward=0&kind=train", ["sort__a2"]), ("task=no", [])):
        told = export_run(store, tmp_path / "run.html", trials=2, only=only)
        text = (tmp_path / "run.html").read_text()
        assert re.findall(r'<section id="trial-.*?<span class="mono">([^<]+)<', text, re.DOTALL) == found
        assert f"{len(found)} trial" in told
    with pytest.raises(UserError, match="sort"):
        export_run(store, tmp_path / "run.html", trials=2, only="sort=size")


def test_no_value_closes_the_script_or_the_style_of_a_file(tmp_path) -> None:
    evil = "</script></style><script>alert(1)</script>"
    store = open_store(run_folder(tmp_path / "run", [trial_row("a__1", task=evil, error=evil)]))
    export_run(store, tmp_path / "run.html", trials=1)
    text = (tmp_path / "run.html").read_text()
    assert text.count("</script>") == 1 and text.count("</style>") == 1
