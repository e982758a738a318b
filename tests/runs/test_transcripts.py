"""What is kept of every trial: what is read back is what was sampled, and a kill tears nothing that a line names."""

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from patience import HANG_S

from harbortrainer.runs.trace_transcript import Trace, transcript_of
from harbortrainer.runs.transcript import FORMAT, Place, Transcript
from harbortrainer.runs.transcript_files import TranscriptWriter, read_transcript, remove_after, transcript_place
from harbortrainer.runs.trial_row import UNDECIDED, TrialRow, read_rows, write_rows

TRACE = {
    "id": "abc",
    "nodes": [
        {"message": {"role": "user", "content": "$ "}, "token_ids": [1, 2, 3], "mask": [False] * 3},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "ls", "reasoning_content": "look"},
            "sampled": True,
            "token_ids": [9, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.123456789, -1.5],
        },
        {"parent": 1, "message": {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}, "token_ids": [6]},
        {
            "parent": 2,
            "message": {"role": "assistant", "content": "done"},
            "sampled": True,
            "token_ids": [9, 7, 8],
            "mask": [False, True, True],
            "logprobs": [-0.25, -0.5],
        },
    ],
    "calls": [
        {"node": 1, "finish_reason": "stop", "time": {"start": 101.0, "end": 101.5}},
        {"node": None, "error": {"type": "Overloaded", "message": "again"}, "time": {"start": 102.0, "end": 102.5}},
        {"node": 3, "finish_reason": "length", "time": {"start": 103.0, "end": 104.0}},
    ],
    "timing": {"start": 100.0},
    "info": {
        "harbor": {
            "trial_name": "t__1",
            "verifier_output": "1 passed",
            "changed_files": [{"path": "/app/x", "how": "added", "size": 3}],
            "changed_files_total": 1,
        }
    },
}


def member(trial: str) -> bytes:
    return Transcript(trial=trial, verifier_output=f"of {trial}").packed()


def row(trial: str, step: int | None = None) -> TrialRow:
    return TrialRow(trial=trial, task="t", kind="train", step=step, outcome="completed", reward=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("rollouts", "transcripts"):
        (tmp_path / folder).mkdir()
    return tmp_path


def finish_step(run: Path, book: TranscriptWriter, step: int, trials: list[str]) -> None:
    rows = book.write(f"step_{step}", [row(trial, step) for trial in trials])
    write_rows(run / f"rollouts/step_{step}.jsonl", rows)


def rows_of(run: Path, name: str) -> list[tuple[str, TrialRow]]:
    """Return the rows of a file, each with the file's name."""
    folder = "transcripts" if name == "pending" else "rollouts"
    return [(name, row) for row in read_rows(run / folder / f"{name}.jsonl")]


def read_of(run: Path, found: tuple[str, TrialRow]) -> Transcript:
    name, row = found
    assert row.transcript is not None
    kept = read_transcript(run, transcript_place(name, row.transcript), row.trial)
    assert kept is not None
    return kept


def test_reads_arrays_of_verifiers_041_as_lists():
    nodes = [SimpleNamespace(**node) for node in Trace.model_validate(TRACE).model_dump()["nodes"]]
    for node in nodes:
        node.token_ids = np.array(node.token_ids, np.int32)
        node.mask, node.logprobs = np.array(node.mask, bool), np.array(node.logprobs, np.float32)
    assert transcript_of(TRACE | {"nodes": nodes}).packed() == transcript_of(TRACE).packed()


def test_turn_has_prompt_tokens_and_logprobs():
    kept = transcript_of(TRACE, versions={1: 4, 3: 5}, seq_len=9)
    first, second = kept.turns()
    assert (first.prompt_len, first.token_ids, first.logprobs) == (4, [4, 5], [-0.123457, -1.5])
    assert (second.prompt_len, second.token_ids, second.logprobs) == (8, [7, 8], [-0.25, -0.5])
    assert (first.version, second.version) == (4, 5)
    assert first.trains == (True, True) and second.trains == (True, False), "position 9 is beyond a sample of 9 tokens"
    assert [message.text for message in first.shown] == ["$ "] and [m.text for m in second.shown] == ["a\nb"]
    assert (first.answer.thinking, first.answer.finish, first.answer.began, first.answer.took) == (
        "look",
        "stop",
        1,
        0.5,
    )
    assert kept.lost_calls[0].error == "Overloaded: again"
    assert (kept.trial, kept.verifier_output, kept.changed_files_total) == ("t__1", "1 passed", 1)


def test_transcript_round_trip():
    kept = transcript_of(TRACE, versions={1: 4, 3: 5}, seq_len=9)
    assert Transcript.unpacked(kept.packed()) == kept


def test_rewritten_history_is_separate_path():
    fork = {"parent": 0, "message": {"role": "assistant", "content": "no"}, "sampled": True, "mask": [True]}
    kept = transcript_of({**TRACE, "nodes": [*TRACE["nodes"], fork | {"token_ids": [5], "logprobs": [-1.0]}]})
    assert kept.branches() == [3, 4]
    assert [message.text for message in kept.path(4)] == ["$ ", "no"] and kept.turns()[2].prompt_len == 3


def test_answer_without_ids_uses_server_counts():
    call = {"node": 0, "usage": {"prompt_tokens": 64, "cached_input_tokens": 6, "completion_tokens": 7}}
    said = {"message": {"role": "assistant", "content": "hi"}, "sampled": True}
    turn = transcript_of({"id": "x", "nodes": [said], "calls": [call]}).turns()[0]
    assert (turn.prompt_len, turn.answer.sampled_len, turn.token_ids) == (70, 7, [])


def test_rejects_other_transcript_format():
    told = {"format": FORMAT + 1, "trial": "t"}
    assert Transcript.unpacked(gzip.compress(json.dumps(told).encode())) is None


class SlowWriter(TranscriptWriter):
    """A writer whose rewrite lasts until it is permitted to end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_mb=1)
        self.rewriting, self.may_end = threading.Event(), threading.Event()

    def _rewrite_pending(self) -> None:
        super()._rewrite_pending()
        self.rewriting.set()
        assert self.may_end.wait(HANG_S)


def test_add_does_not_wait_for_rewrite(run: Path):
    book = SlowWriter(run)
    for trial in ("a", "b"):
        book.add(member(trial), row(trial))
    with ThreadPoolExecutor() as pool:
        step = pool.submit(finish_step, run, book, 1, ["a"])
        assert book.rewriting.wait(HANG_S)
        pool.submit(book.add, member("c"), row("c")).result(HANG_S)
        assert [found[1].trial for found in rows_of(run, "pending")] == ["b"], "the rewrite has not ended"
        book.may_end.set()
        step.result(HANG_S)
    pending = rows_of(run, "pending")
    assert [read_of(run, found).verifier_output for found in pending] == ["of b", "of c"]
    finish_step(run, book, 2, ["c", "b"])
    assert [read_of(run, found).verifier_output for found in rows_of(run, "step_2")] == ["of c", "of b"]


def test_concurrent_adds_are_all_pending(run: Path):
    book = TranscriptWriter(run, max_mb=1)
    names = [f"t{number}" for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        adds = [pool.submit(book.add, member(name), row(name)) for name in names]
        finish_step(run, book, 1, [])
        for add in adds:
            add.result(HANG_S)
    found = {found[1].trial: read_of(run, found).verifier_output for found in rows_of(run, "pending")}
    assert found == {name: f"of {name}" for name in names}


def test_rows_of_finished_step_have_transcript_places(run: Path):
    book = TranscriptWriter(run, max_mb=1)
    for trial in ("a", "b", "c"):
        book.add(member(trial), row(trial))
    finish_step(run, book, 1, ["c", "a", "never began"])
    first, second, third = rows_of(run, "step_1")
    assert [read_of(run, one).verifier_output for one in (first, second)] == ["of c", "of a"]
    assert third[1].transcript is None
    assert gzip.decompress((run / "transcripts/step_1.jsonl.gz").read_bytes()).count(b"\n") == 2, "zcat prints them"
    (pending,) = rows_of(run, "pending")
    assert (pending[1].trial, pending[1].untrained, pending[1].trained) == ("b", UNDECIDED, False)
    assert read_of(run, pending).verifier_output == "of b"


def test_no_row_refers_to_torn_transcript(run: Path):
    book = TranscriptWriter(run, max_mb=1)
    book.add(member("a"), row("a"))
    with (run / "transcripts/pending.jsonl.gz").open("ab") as file:
        file.write(member("b")[:20])
    with (run / "transcripts/pending.jsonl").open("a") as file:
        file.write('{"trial": "b", "transc')
    assert [read_of(run, found) for found in rows_of(run, "pending")] == [Transcript.unpacked(member("a"))]


def test_resume_removes_later_transcripts(run: Path):
    book = TranscriptWriter(run, max_mb=1)
    for step, trial in ((1, "a"), (2, "b")):
        book.add(member(trial), row(trial))
        finish_step(run, book, step, [trial])
    book.write("eval_step_2", [])
    book.add(member("late"), row("late"))
    remove_after(run, 1)
    assert [path.name for path in (run / "transcripts").iterdir()] == ["step_1.jsonl.gz"]
    again = TranscriptWriter(run, max_mb=1)
    again.add(member("b2"), row("b2"))
    finish_step(run, again, 2, ["b2"])
    assert [read_of(run, found).trial for n in (1, 2) for found in rows_of(run, f"step_{n}")] == ["a", "b2"]


def test_size_limit_removes_oldest_steps(run: Path):
    book = TranscriptWriter(run, max_mb=1)
    big = {trial: gzip.compress(trial.encode() * 10 + bytes(400_000), compresslevel=0) for trial in "abcd"}
    for step, trial in enumerate("abcd", 1):
        book.add(big[trial], row(trial))
        finish_step(run, book, step, [trial])
    left = sorted(path.name for path in (run / "transcripts").iterdir())
    assert left == ["step_3.jsonl.gz", "step_4.jsonl.gz"]
    assert read_transcript(run, transcript_place("step_1", [0, 10]), "a") is None, "kept no longer"


def test_zero_limit_writes_no_transcripts(run: Path):
    book = TranscriptWriter(run, max_mb=0)
    book.add(member("a"), row("a"))
    finish_step(run, book, 1, ["a"])
    assert rows_of(run, "step_1")[0][1].transcript is None and not list((run / "transcripts").iterdir())


def test_read_rejects_transcript_of_other_trial(run: Path):
    (run / "transcripts/step_1.jsonl.gz").write_bytes(member("a"))
    assert read_transcript(run, Place("transcripts/step_1.jsonl.gz", 0, len(member("a"))), "b") is None
