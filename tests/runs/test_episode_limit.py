"""The episodes of a Prime-RL run stay under a size limit: old steps are sealed, the oldest reduced to rows."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import pyzstd
from prime_rl_runs import append_lines, episode, read_lines
from view_runs import write_rows

from harbortrainer.runs.episode_limit import EpisodeLimit
from harbortrainer.runs.good_trials import good_trials
from harbortrainer.runs.prime_rl_files import evaluation_rows, step_files
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.queries import IndexedRun, TrialFilter
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.transcript_detail import TRANSCRIPT_DELETED

pytestmark = pytest.mark.process

STEPS = 5
KILLED = """
import os, signal, sys
from pathlib import Path
from pyzstd import SeekableZstdFile
from harbortrainer.runs import sealed_files
owner, name = {"write": (SeekableZstdFile, "write"), "flush": (sealed_files, "flush"), "rename": (Path, "replace"),
               "remove": (Path, "unlink")}[sys.argv[2]]
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, kill)
sealed_files.seal(Path(sys.argv[1]))
"""


def file_of(run: Path, step: int, subset: str = "all", kind: str = "train") -> Path:
    return run / f"rollouts/step_{step}/{kind}/{subset}/traces.jsonl"


def set_age(path: Path, seconds: float) -> None:
    changed = time.time() - seconds
    os.utime(path, (changed, changed))


def write_run(run: Path) -> Path:
    """Write a run of `STEPS` steps, each with a trained trial, one that failed and an evaluation; hours old."""
    for step in range(1, STEPS + 1):
        trained = episode(f"a{step}", advantage=0.5)
        lines = [episode(f"a{step}"), episode(f"b{step}", ok=False, outcome="sandbox_error", reward=None, rewards=None)]
        write_rows(file_of(run, step), lines)
        write_rows(file_of(run, step, "effective"), [trained])
        write_rows(file_of(run, step, kind="eval"), [episode(f"e{step}", reward=step / 8)])
        write_rows(file_of(run, step, "effective", kind="eval"), [episode(f"e{step}", reward=step / 8)])
    for _, path in step_files(run):
        set_age(path, 7200)
    return run


def limit_of(run: Path, *, max_mb: int = 4000) -> EpisodeLimit:
    """Return the limit of a run that has written an episode since its start."""
    limit = EpisodeLimit(run, max_mb=max_mb)
    set_age(file_of(run, STEPS), -1)
    return limit


def rows(store: IndexedRun) -> list[TrialRow]:
    return sorted(store.find(TrialFilter())[0], key=lambda row: row.trial)


def answers(store: IndexedRun) -> dict[str, list[tuple]]:
    """Return the answers of every trial with their tokens."""
    details = {row.trial: store.detail(row.trial) for row in rows(store)}
    return {
        trial: [(turn.answer, turn.tokens and turn.tokens(9)) for turn in detail.turns]
        for trial, detail in details.items()
        if detail is not None
    }


def trained_trials(run: Path) -> tuple[set[str], Counter[str]]:
    left_out = Counter[str]()
    return {one.row.trial for one in good_trials(run, min_reward=0.5, left_out=left_out)}, left_out


def test_old_steps_are_sealed_and_read_as_before(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    live = open_store(run)
    before, evaluations, shown, good = rows(live), evaluation_rows(run), answers(live), trained_trials(run)
    indexed = live._rows("SELECT id, path, done FROM sources ORDER BY id")
    limit_of(run).check()
    plain = {path.parts[-4] for path in run.rglob("traces.jsonl")}
    sealed = {path.parts[-4] for path in run.rglob("traces.jsonl.zst")}
    assert (plain, sealed) == ({"step_4", "step_5"}, {"step_1", "step_2", "step_3"})
    live.refresh()
    assert live._rows("SELECT id, path, done FROM sources ORDER BY id") == indexed, "an index is not read again"
    for store in (live, open_store(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("*.sqlite")))):
        assert rows(store) == before and len(before) == 3 * STEPS
        assert answers(store) == shown
    assert (evaluation_rows(run), trained_trials(run)) == (evaluations, good)
    text = pyzstd.decompress(Path(f"{file_of(run, 1)}.zst").read_bytes())
    assert [json.loads(line)["id"] for line in text.splitlines()] == ["e-a1", "e-b1"], "zstdcat reads it too"


@pytest.mark.parametrize("moment", ["write", "flush", "rename", "remove"])
def test_kill_while_a_file_is_sealed_loses_nothing(tmp_path: Path, moment: str) -> None:
    run = write_run(tmp_path / "run")
    before = rows(open_store(run))
    done = subprocess.run([sys.executable, "-c", KILLED, str(file_of(run, 1)), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    assert rows(open_store(run)) == before
    limit_of(run).check()
    assert rows(open_store(run)) == before
    assert not file_of(run, 1).exists() and not list(run.rglob(".*.part"))


def test_late_line_joins_the_sealed_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    limit = limit_of(run)
    limit.check()
    append_lines(file_of(run, 1, kind="eval"), [episode("late")])
    set_age(file_of(run, 1, kind="eval"), 61)
    limit.check()
    assert [row.trial for row in evaluation_rows(run) if row.step == 0] == ["e1", "late"]
    assert not file_of(run, 1, kind="eval").exists()


def test_file_that_grows_while_it_is_sealed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harbortrainer.runs import sealed_files

    path, write = file_of(write_run(tmp_path / "run"), 1), sealed_files.write_sealed

    def write_and_append(path: Path, text: Iterable[bytes]) -> None:
        write(path, text)
        append_lines(path, [episode("late")])

    monkeypatch.setattr(sealed_files, "write_sealed", write_and_append)
    sealed_files.seal(path)
    assert [line["id"] for line in read_lines(path)] == ["e-a1", "e-b1", "e-late"]
    monkeypatch.undo()
    sealed_files.seal(path)
    assert not path.exists()
    append_lines(path, [episode("later")])
    flush = sealed_files.flush

    def flush_and_append(at: Path) -> None:
        flush(at)
        append_lines(path, [episode("last")])

    monkeypatch.setattr(sealed_files, "flush", flush_and_append)
    sealed_files.seal(path)
    monkeypatch.undo()
    sealed_files.seal(path)
    with sealed_files.open_lines(path) as lines:
        ids = [json.loads(line)["id"] for line in lines]
    assert ids == ["e-a1", "e-b1", "e-late", "e-later", *["e-last"] * (len(ids) - 4)] and len(ids) > 4


def test_changed_and_newest_files_stay_plain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    EpisodeLimit(run, max_mb=0).check()
    assert not list(run.rglob("*.zst")), "nothing of this start: Prime-RL may still delete folders"
    limit = limit_of(run)
    set_age(file_of(run, 2), 0)
    limit.check()
    assert file_of(run, 2).exists() and file_of(run, 4).exists() and not file_of(run, 1).exists()


def test_oldest_steps_are_reduced_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    live = open_store(run)
    before, evaluations = rows(live), evaluation_rows(run)
    limit = limit_of(run, max_mb=0)
    limit.check()
    live.refresh()
    for store in (live, open_store(run)):
        assert rows(store) == before and evaluation_rows(run) == evaluations
        gone, kept = store.detail("a3"), store.detail("a4")
        assert gone is not None and (list(gone.turns), gone.transcript) == ([], TRANSCRIPT_DELETED)
        assert kept is not None and len(kept.turns) == 1
    good, left_out = trained_trials(run)
    assert good == {"a4", "a5"} and left_out["without a transcript"] == 3
    assert "more than 0 MB (transcripts_mb)" in capsys.readouterr().err
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*.zst")}
    limit.check()
    limit_of(run, max_mb=0).check()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.zst")} == times and not capsys.readouterr().err


def test_only_what_is_over_the_limit_is_reduced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in range(1, STEPS + 1):
        long = episode(f"a{step}")
        long["traces"][0]["nodes"][1]["message"]["content"] = os.urandom(400_000).hex()
        write_rows(file_of(run, step), [long])
        set_age(file_of(run, step), 7200)
    limit_of(run, max_mb=1).check()
    sizes = [Path(f"{file_of(run, step)}.zst").stat().st_size for step in (1, 2, 3)]
    assert [size < 10_000 for size in sizes] == [True, False, False]


def test_readers_go_on_while_files_are_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    store, ended, seen = open_store(run), threading.Event(), list[tuple[int, int]]()
    limit, reduced = limit_of(run), limit_of(run, max_mb=0)

    def work() -> None:
        limit.check()
        reduced.reduce()
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ended.is_set() or not seen:
        store.refresh()
        seen.append((len(rows(store)), len(evaluation_rows(run))))
    thread.join()
    assert set(seen) == {(3 * STEPS, STEPS)}
