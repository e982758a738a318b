"""Crash-safe writes."""

import math

from harbortrainer.runs.durable import append_line, read_lines, repair, write_whole


def test_torn_last_line_is_ignored_and_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_lines(path) == [{"step": 1}]
    assert repair(path) == 1
    append_line(path, {"step": 2})
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_repair_drops_unwanted_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_line(path, {"step": step})
    repair(path, keep=lambda row: row["step"] <= 2)
    assert [row["step"] for row in read_lines(path)] == [1, 2]


def test_non_finite_numbers_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"a": math.nan, "b": [math.inf], "c": {"d": 0.5}})
    assert read_lines(path) == [{"a": None, "b": [None], "c": {"d": 0.5}}]


def test_write_whole_replaces_file(tmp_path):
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_read_lines_of_missing_file_is_empty(tmp_path):
    assert read_lines(tmp_path / "none.jsonl") == []
