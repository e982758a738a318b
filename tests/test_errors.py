"""Messages of errors: a quoted text that ends in a full stop is joined without it."""

import logging
from types import SimpleNamespace

import pytest

from harbortrainer.doctor.finding import warn, yellow
from harbortrainer.errors import RunStoppedError, UserError, clauses, first_line
from harbortrainer.tasks.verdict import Verdict, bad
from harbortrainer.trials import provider_faults


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("wrong key.", "wrong key; do"),
        ("wrong key;\n", "wrong key; do"),
        ("in ../..", "in ../..; do"),
        ("in .", "in .; do"),
        ("cut ...", "cut ...; do"),
        ("", "do"),
    ],
)
def test_quoted_text_loses_its_full_stop(text: str, joined: str):
    assert clauses(text, "do") == joined


def test_last_text_stays():
    assert clauses("a", "see b.") == "a; see b."
    assert clauses() == ""


def test_errors_and_findings_have_no_doubled_punctuation(capsys: pytest.CaptureFixture[str]):
    warn([yellow("agent", "it says no.", "do", "file")])
    assert capsys.readouterr().out == "warning: file: it says no; do\n"
    assert str(UserError("it says no.", where="file", do="do")) == "file: it says no; do"
    assert str(RunStoppedError("it says no.", do="do")) == "it says no; do"
    assert Verdict(task="a", key="b", findings=[bad("host", "no."), bad("host", "no.")]).problem == "no; no."


def test_error_without_a_message_is_named_by_its_type():
    assert first_line(TimeoutError()) == "TimeoutError"
    assert first_line(ValueError("\nno such key\nsee the docs")) == "no such key"


async def test_failed_stop_is_logged_without_doubled_punctuation(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def stop(delete: bool) -> None:
        raise RuntimeError("try again later.")

    monkeypatch.setattr(provider_faults, "RETRY_PAUSES_S", ())
    paths = SimpleNamespace(trial_dir=tmp_path / "trial")
    sandbox = SimpleNamespace(session_id="s", trial_paths=paths, type=lambda: "toy", stop=stop)
    with caplog.at_level(logging.WARNING):
        provider_faults.guard_environment(sandbox)  # ty: ignore[invalid-argument-type]
        await sandbox.stop(True)
    assert "RuntimeError: try again later; retrying in the background" in caplog.text
