"""Harbor's result, read."""

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


def test_the_message_names_the_root_cause():
    assert _message(caught(OSError("disk full"))) == "failed to add tests (caused by OSError: disk full)"


def test_a_failure_without_a_cause_is_told_as_it_is():
    assert _message(caught(None)) == "failed to add tests"
