"""Only a line feed ends a line: form feeds, NEL and U+2028 inside tasks' and models' text stay where they are."""

import json
from pathlib import Path

import pytest

from harbortrainer.commands.rollout import last_lines
from harbortrainer.runs.durable import append_line, read_lines, repair
from harbortrainer.sandbox.dockerfile import extract_heredocs, inline_heredocs, normalize_heredocs, parse
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord
from harbortrainer.warmup.replay import answers_of

SIGNS = pytest.mark.parametrize("sign", list("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), ids=ascii)


@pytest.mark.parametrize("sign", list("\x85\u2028\u2029"), ids=ascii)
def test_json_line_keeps_its_text(tmp_path: Path, sign: str) -> None:
    """Libraries such as orjson do not escape these three."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "one{sign}two"}}\n', encoding="utf-8")
    append_line(file, {"text": f"three{sign}four"})
    expected = [{"text": f"one{sign}two"}, {"text": f"three{sign}four"}]
    assert read_lines(file) == expected
    assert repair(file) == 2 and read_lines(file) == expected


@SIGNS
def test_replayed_solution_keeps_its_text(sign: str) -> None:
    command = f"printf 'a{sign}set -b' > /app/answer\n"
    assert answers_of(f"#!/bin/bash\nset -e\n{command}") == answers_of(command)
    assert json.dumps(f"a{sign}set -b")[1:-1] in answers_of(command)[0]


@SIGNS
def test_dockerfile_heredoc_keeps_its_text(sign: str) -> None:
    text = f"FROM x\nRUN cat > /data <<EOF\na{sign}EOF\nb\nEOF\nENV AFTER=1\n"
    plain, bodies = extract_heredocs(text)
    assert bodies == {1: [("EOF", f"a{sign}EOF\nb\n")]}
    assert plain.count("\n") == text.count("\n") and normalize_heredocs(text) == text
    assert json.dumps(f"a{sign}EOF\nb\n")[1:-1] in inline_heredocs(text)
    assert [step.name for step in parse(text).steps] == ["RUN", "ENV"]


@SIGNS
def test_printed_line_is_one_line(tmp_path: Path, sign: str) -> None:
    (tmp_path / "test-stdout.txt").write_text(f"first\none{sign}two\n")
    record = TrialRecord(outcome=Outcome.cancelled, task="t", trial_dir=str(tmp_path))
    assert len(last_lines(record, "test-stdout.txt")) == 2
