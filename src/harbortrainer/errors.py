"""The errors that a command reports as one line, and its exit codes.

- `UserError`: a user's mistake. Exit code 2; no file is left half-written.
- `RunStoppedError`: the run cannot continue, for a reason that the user can act on. Exit code 1.

Any other exception is a bug and keeps its stack trace, except an OSError about a path of the command line. A failure
inside a trial is not an exception but an `Outcome` (see `harbortrainer.trials.outcome`).
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

EXIT_STOPPED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


_ENDS = re.compile(r"(?<![.\s])[.;,]\s*$")
"""The punctuation at the end of a text that is no path and not cut."""


def clauses(*parts: str) -> str:
    """Return the parts of a message, joined by "; ". Empty parts are left out, and quoted texts lose their full stop.

    Example:
        >>> clauses("the last with AuthError: wrong key.", "", "check the key")
        'the last with AuthError: wrong key; check the key'
    """
    given = [part for part in parts if part]
    return "; ".join([*(_ENDS.sub("", part) for part in given[:-1]), *given[-1:]])


class UserError(Exception):
    """A user's mistake. Its message is one line: where, what is wrong, what to do.

    Args:
        what: What is wrong, without a full stop.
        where: The file, and its key if there is one (`configs/a.toml: orchestrator.batch_size`).
        do: What the user should do, in the imperative.

    Example:
        >>> print(UserError("no tasks here", where="datasets/empty", do="point tasks_dir at a folder of Harbor tasks"))
        datasets/empty: no tasks here; point tasks_dir at a folder of Harbor tasks
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__((f"{where}: " if where else "") + clauses(what, do))


class CombinedUserError(UserError):
    """Several mistakes. Its text has one line for each; its `what`, `where` and `do` are the first mistake's.

    Args:
        errors: The mistakes, at least one.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__(errors[0].what, where=errors[0].where, do=errors[0].do)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def parts_of(error: UserError) -> tuple[UserError, ...]:
    """Return the single mistakes of an error."""
    return error.errors if isinstance(error, CombinedUserError) else (error,)


def lines_of(error: UserError | OSError, arguments: Sequence[str]) -> str:
    """Return the lines that report a mistake in a command with these arguments.

    Raises:
        OSError: The given one, if it is about no path that an argument names.
    """
    if isinstance(error, UserError):
        return "\n".join(f"error: {part}" for part in parts_of(error))
    values = [text.partition("=")[2] if text.startswith("-") else text for text in arguments]
    named, file = [Path(value).absolute() for value in values if value], Path(str(error.filename)).absolute()
    if error.filename is None or not any(file == path or file in path.parents for path in named):
        raise error
    return f"error: {error.filename}: {error.strerror}; pass another path"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none.

    Example:
        >>> first_line(ValueError("no such key\\nsee the docs")), first_line(TimeoutError())
        ('no such key', 'TimeoutError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def joined(errors: Iterable[UserError]) -> UserError | None:
    """Return all mistakes as one error; None if there are none.

    An error about a table or about one of its keys may follow from the other, so only the first of the two is kept.

    Example:
        >>> str(joined([UserError("no such key", where="file: a.b"), UserError("has no b", where="file: a")]))
        'file: a.b: no such key'
    """
    found: list[UserError] = []
    for error in errors:
        found += [part for part in parts_of(error) if not any(_related(part, other) for other in found)]
    return CombinedUserError(found) if len(found) > 1 else found[0] if found else None


def _related(error: UserError, other: UserError) -> bool:
    """Whether one error is about the other's key, or about a table that contains it."""
    first, second = sorted((error.where, other.where), key=len)
    if ": " not in first:  # a file, without a key
        return first == second and error.what == other.what
    return f"{second}.".startswith((f"{first}.", f"{first}["))


def choice_advice(value: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return advice for a value that is none of the choices: the most similar one, else `otherwise` or all of them.

    Example:
        >>> choice_advice("dokcer", ["local", "docker"])
        "did you mean 'docker'?"
    """
    known = list(choices)
    near = get_close_matches(value.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"choose one of {', '.join(known)}"


class RunStoppedError(Exception):
    """The run cannot continue.

    Args:
        what: What happened, without a full stop.
        do: What the user can do, in the imperative.
    """

    def __init__(self, what: str, *, do: str = "") -> None:
        self.what, self.do = what, do
        super().__init__(clauses(what, do))


class ProofError(RuntimeError):
    """Tokens do not match their log-probabilities, or trials their rewards: training on them would train on noise."""
