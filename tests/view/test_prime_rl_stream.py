"""The pages of a Prime-RL run in the layout of newer releases: a stream of episodes with annotations."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from prime_rl_runs import append_lines, arrived, converted, episode, read_lines, seal, shipped, write_step_run
from starlette.testclient import TestClient
from verifiers.v1.episode import WireEpisode

from harbortrainer.errors import UserError
from harbortrainer.runs.prime_rl_files import config_files
from harbortrainer.runs.provenance import named_model
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.queries import IndexedRun, TrialFilter
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.run_list import find_runs
from harbortrainer.view.server import Site
from harbortrainer.view.trial_view import TrialDetail

ROWS = {
    "a": ("train", 2, 1.0, True, "", 0.5),
    "b": ("train", 2, 0.0, True, "", -0.5),
    "c": ("train", 1, 1.0, False, "left out by Prime-RL", None),
    "d": ("train", 1, None, False, "failed", None),
    "e": ("eval", 0, 1.0, False, "", None),
}
"""Kind, step, reward, trained, reason and advantage of the trials of `write_step_run`, by hand."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_step_run(tmp_path / "old", "Qwen/Qwen3-8B")


def rows(store: IndexedRun) -> dict[str, tuple[object, ...]]:
    found, _ = store.find(TrialFilter(sort="task"))
    return {row.trial: (row.kind, row.step, row.reward, row.trained, row.untrained, row.advantage) for row in found}


def all_rows(store: IndexedRun) -> list[TrialRow]:
    return sorted(store.find(TrialFilter())[0], key=lambda row: row.trial)


def shown(store: IndexedRun, trial: str) -> TrialDetail:
    """Return a trial with the tokens of its turns in place of the functions that return them."""
    detail = store.detail(trial)
    assert detail is not None
    return replace(detail, turns=[replace(turn, tokens=turn.tokens and turn.tokens(100)) for turn in detail.turns])


def advantages(store: IndexedRun, trial: str) -> list[float | None]:
    """Return the advantages of the tokens of a trial's first turn."""
    detail = store.detail(trial)
    tokens = None if detail is None else detail.turns[0].tokens
    return [token.advantage for token in tokens(100)] if tokens else []


def recorded(line: dict[str, Any]) -> dict[str, Any]:
    """Return an episode as verifiers writes it."""
    task = {"type": "HarborTask", "key": "k", "data": {"idx": 0, "name": "sort"}}
    traces = [trace | {"task": task, "agent": {"config": {}}} for trace in line["traces"]]
    return WireEpisode.model_validate(line | {"task": task, "traces": traces}).to_record()


def page_text(store: IndexedRun, path: str) -> str:
    response = TestClient(Site(store).app(), base_url="http://localhost").get(path)
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.text.split("<main>")[1])).split())


@pytest.mark.parametrize("root", ["monitors/file", "."])
@pytest.mark.parametrize("sealed", [(), (0,), (0, 1)])
def test_both_layouts_give_the_same_trials(old: Path, tmp_path: Path, root: str, sealed: tuple[int, ...]) -> None:
    run = converted(old, tmp_path / "new", root=root)
    for number in sealed:
        seal(run.chunk(number))
    before, after = open_store(old), open_store(run.path)
    assert rows(before) == rows(after) == ROWS
    assert all_rows(after) == all_rows(before)
    assert [shown(after, trial) for trial in ROWS] == [shown(before, trial) for trial in ROWS]
    assert after.group("g1") and {row.trial for row in after.group("g1")} == {row.trial for row in before.group("g1")}
    assert after.training_counts() == {"trained": 2, "left out by Prime-RL": 1, "failed": 1}
    assert after.metrics() == before.metrics()
    assert list(find_runs(tmp_path)) == ["new", "old"]


def test_pages_show_model_steps_and_turns(old: Path, tmp_path: Path) -> None:
    store = open_store(converted(old, tmp_path / "new").path)
    text = page_text(store, "/")
    assert "Prime-RL run model Qwen/Qwen3-8B" in text and "waiting for trials 75.0% 6.0 s" in text
    assert store.config()["trainer.max_steps"] == 6
    text = page_text(store, "/trial/b")
    assert "(advantage -0.5; reward 0, group mean 0.667)" in text and "Instruction sort it" in text


def test_records_of_verifiers_give_the_same_rows(old: Path, tmp_path: Path) -> None:
    for file in old.glob("rollouts/*/*/*/traces.jsonl"):
        records = [recorded(line) for line in read_lines(file)]
        file.write_text("")
        append_lines(file, records)
    run = converted(old, tmp_path / "new")
    assert rows(open_store(old)) == rows(open_store(run.path)) == ROWS


def test_trial_trains_when_its_annotation_arrives(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new")
    store = open_store(run.path)
    late = episode("f", advantage=0.25)
    run.add([arrived(late, "train", 2)], chunk=1)
    stamp = store.refresh()
    assert rows(store)["f"] == ("train", 2, 1.0, False, "left out by Prime-RL", None)
    run.annotate(shipped(late, 3))
    assert store.refresh() != stamp
    assert rows(store)["f"] == ("train", 3, 1.0, True, "", 0.25)
    detail = store.detail("f")
    assert detail is not None and (detail.row.step, detail.row.advantage, detail.row.trained) == (3, 0.25, True)
    run.annotate(shipped(early := episode("g", advantage=1.0), 3))
    store.refresh()
    run.add([arrived(early, "train", 2)], chunk=1)
    store.refresh()
    assert rows(store)["g"] == ("train", 3, 1.0, True, "", 1.0)


@pytest.mark.parametrize("sealed", [False, True])
def test_tokens_have_their_own_advantages(tmp_path: Path, sealed: bool) -> None:
    old = write_step_run(tmp_path / "old", "Qwen/Qwen3-8B")
    file = old / "rollouts/step_2/train/effective/traces.jsonl"
    trained, other = read_lines(file)
    trained["traces"][0]["nodes"][1]["advantages"] = [0.5, 0.25]
    file.write_text("")
    append_lines(file, [trained, other])
    run = converted(old, tmp_path / "new")
    if sealed:
        seal(run.traces / "annotations/orch/00000.jsonl")
    store = open_store(run.path)
    assert rows(store)["a"][-1] == 0.375, "the mean"
    assert advantages(open_store(old), "a") == advantages(store, "a") == [0.5, 0.25]
    assert advantages(store, "b") == [-0.5, -0.5]


def test_chunk_keeps_its_rows_when_it_is_sealed(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new", chunks=1)
    store = open_store(run.path)
    before = store._rows("SELECT id, path, done FROM sources ORDER BY id")
    seal(run.chunk(0))
    run.add([arrived(episode("f"), "train", 2)], chunk=1)
    store.refresh()
    sources = store._rows("SELECT id, path, done FROM sources ORDER BY id")
    assert sources[:-1] == before and sources[-1][1].endswith("stream/00001.jsonl")
    assert rows(store) == ROWS | {"f": ("train", 2, 1.0, False, "left out by Prime-RL", None)}
    detail = store.detail("a")
    assert detail is not None and [turn.answer for turn in detail.turns] == ["ls"]
    stamp = store.refresh()
    assert store.refresh() == stamp


def test_line_in_progress_is_read_when_it_is_complete(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new")
    line = json.dumps(arrived(episode("f"), "train", 2)) + "\n"
    with run.chunk(1).open("a") as chunk:
        chunk.write(line[:100])
        chunk.flush()
        store = open_store(run.path)
        assert rows(store) == ROWS
        chunk.write(line[100:])
    store.refresh()
    assert rows(store).keys() == ROWS.keys() | {"f"}


def test_removed_annotations_no_longer_apply(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new")
    store = open_store(run.path)
    assert rows(store) == ROWS
    (run.traces / "annotations/orch.index.jsonl").unlink()
    store.refresh()
    assert rows(store)["a"] == ("train", 1, 1.0, False, "left out by Prime-RL", None)


def test_evaluation_has_the_step_of_its_policy(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new")
    run.add([late := arrived(episode("f"), "eval", 4)], chunk=1)
    run.annotate([{"trace_id": late["traces"][0]["id"], "info": {"effective": True, "ship": {"step": 4}}}])
    unstamped = arrived(episode("g"), "eval", 9)
    del unstamped["traces"][0]["info"]["kind"], unstamped["traces"][0]["info"]["arrival"]
    unstamped["run"]["work"] |= {"type": "eval", "step": 5}
    run.add([unstamped], chunk=1)
    found = rows(open_store(run.path))
    assert (found["f"], found["g"]) == (("eval", 4, 1.0, False, "", None), ("eval", 5, 1.0, False, "", None))


@pytest.mark.parametrize("content", [b"no zstd", b"\x28\xb5\x2f\xfd" + bytes(40)])
def test_damaged_sealed_chunk_is_one_line_of_error(old: Path, tmp_path: Path, content: bytes) -> None:
    run = converted(old, tmp_path / "new")
    run.chunk(0).unlink()
    Path(f"{run.chunk(0)}.zst").write_bytes(content)
    with pytest.raises(UserError, match=r"00000\.jsonl\.zst: is damaged \(.*restore the file") as error:
        open_store(run.path)
    assert "\n" not in str(error.value)


def test_config_is_read_from_the_whole_file_alone(old: Path, tmp_path: Path) -> None:
    run = converted(old, tmp_path / "new")
    files = config_files(run.path)
    assert files.keys() == {"trainer", "orchestrator"} and "latest" in files["trainer"].parts
    whole = {name: json.loads(file.read_text()) for name, file in files.items()}
    for file in files.values():
        file.unlink()
    (run.path / "configs/latest/resolved/rl.json").write_text(json.dumps(whole | {"max_steps": 6}))
    assert named_model(run.path) == "Qwen/Qwen3-8B"
    assert open_store(run.path).head().model == "Qwen/Qwen3-8B"


def test_lines_that_a_kill_has_cut_do_not_hide_what_follows(old, tmp_path, caplog):
    run = converted(old, tmp_path / "new")
    cut = json.dumps(arrived(episode("torn"), "train", 2))[:300]
    index, metrics = run.traces / "annotations/orch.index.jsonl", run.root / "metrics.jsonl"
    for path, text in ((run.chunk(1), cut), (index, '{"trace_id":"id-c","chu'), (metrics, '{"step": 3, "ti')):
        with path.open("a") as file:
            file.write(text)
    store = open_store(run.path)
    assert set(rows(store)) == {"a", "b", "c", "d", "e"}
    append_lines(run.chunk(1), [arrived(episode("f"), "train", 2), arrived(episode("g"), "train", 2)])
    append_lines(index, [{"trace_id": "id-c", "chunk": 0, "offset": 0, "info": {}}])
    append_lines(metrics, [{"step": 3, "time/step": 1.0}])
    store.refresh()
    for reopened in (store, open_store(run.path)):
        assert set(rows(reopened)) == {"a", "b", "c", "d", "e", "f", "g"}
        assert shown(reopened, "f").row.trial == "f"
        assert [row for row in reopened.metrics() if row.get("step") == 3] == [{"step": 3, "time/step": 1.0}]
    assert "the line at byte" in caplog.text and "was cut when the run ended" in caplog.text


def test_line_that_is_no_record_is_left_out(old, tmp_path, caplog):
    run = converted(old, tmp_path / "new")
    with run.chunk(1).open("a") as file:
        file.write('{"id": "cut", "traces": [{"id":\n')
    assert set(rows(open_store(run.path))) == {"a", "b", "c", "d", "e"}
    assert "was cut" in caplog.text
