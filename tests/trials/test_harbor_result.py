"""Messages read from Harbor's trial result."""

from harbor.models.trial.result import ExceptionInfo

from harbortrainer.trials.harbor_result import _message


def fail(cause: OSError | None) -> None:
    if cause is None:
        raise RuntimeError("failed to add tests")
    try:
        raise cause
    except OSError as error:
        raise RuntimeError("failed to add tests") from error


def caught(cause: OSError | None) -> ExceptionInfo:
    try:
        fail(cause)
    except RuntimeError as error:
        return ExceptionInfo.from_exception(error)
    raise AssertionError


def test_message_names_root_cause():
    assert _message(caught(OSError("disk full"))) == "failed to add tests (caused by OSError: disk full)"


def test_message_without_cause_is_unchanged():
    assert _message(caught(None)) == "failed to add tests"
