"""Interface for reading one kind of run folder, and access to its JSON lines by file offset."""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from harbortrainer.errors import UserError
from harbortrainer.runs.prime_rl_files import TrainedTrace
from harbortrainer.runs.sealed_files import open_lines
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.run_config import FlatConfig
from harbortrainer.view.trial_view import RunHead, TrialDetail


class LineLocation(NamedTuple):
    """File, offset and length in bytes of a line."""

    path: Path
    offset: int
    length: int


type JsonLine = dict[str, object]


def parse_line(line: bytes, location: LineLocation) -> JsonLine:
    """Parse a line that holds one JSON object. Raises `UserError` for anything else."""
    what = "is not a JSON object"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        row = None
        what = "is nested too deeply" if isinstance(error, RecursionError) else what
    if not isinstance(row, dict):
        where = f"{location.path}: the line at byte {location.offset}"
        raise UserError(what, where=where, do="remove that line or restore the file")
    return row


def parse_torn_line(line: bytes, location: LineLocation) -> tuple[JsonLine, LineLocation] | None:
    """Parse the whole record at the end of a line that begins with a cut one; None if there is none.

    The record begins with the same key as the cut one, at the first place from which the rest is one JSON object.
    """
    first_key = line[: line.find(b":") + 1]
    start = line.find(first_key, 1) if first_key else -1
    while start > 0:
        whole = LineLocation(location.path, location.offset + start, len(line) - start)
        with suppress(UserError):
            return parse_line(line[start:], whole), whole
        start = line.find(first_key, start + 1)
    return None


def read_line(location: LineLocation) -> JsonLine:
    """Read the line at a location. Raises `UserError` if the file no longer exists."""
    try:
        with open_lines(location.path) as file:
            file.seek(location.offset)
            return parse_line(file.read(location.length), location)
    except FileNotFoundError:
        raise UserError("no longer exists", where=str(location.path), do="reload the page") from None


class FolderReader(Protocol):
    """Reader of one kind of folder."""

    required_fields: frozenset[str]
    """Fields that every trial's line has; a line without them is from another release."""
    goes_on_after_torn_lines: bool
    """Whether a resumed run appends to a line that a kill has cut, so that the two are one line."""

    def trial_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per trial, in the order of the run."""
        ...

    def annotation_files(self, folder: Path) -> list[Path]:
        """Return the files with lines about trials of `trial_files`, written later than these."""
        ...

    def metric_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per step."""
        ...

    def row(self, line: JsonLine, file: Path) -> TrialRow | None:
        """Return the row of a line, with defaults for damaged fields; None if the line has no trial."""
        ...

    def trace(self, line: JsonLine) -> str:
        """Return the id by which annotations name a trial; empty for a trial without annotations."""
        ...

    def annotation(self, line: JsonLine) -> TrainedTrace | None:
        """Return the annotation in a line of `annotation_files`; None to ignore the line."""
        ...

    def detail(self, folder: Path, row: TrialRow, line: JsonLine, file: Path) -> TrialDetail:
        """Return a trial with its turns; `row` is the row of `line`."""
        ...

    def head(self, folder: Path) -> RunHead:
        """Return the name, kind and status of the folder."""
        ...

    def config(self, folder: Path) -> FlatConfig:
        """Return the config of the run; of an evaluation its rules."""
        ...


class WithoutAnnotations:
    """The part of a `FolderReader` for folders whose lines are final when they are written."""

    def annotation_files(self, folder: Path) -> list[Path]:
        """Return no files."""
        return []

    def trace(self, line: JsonLine) -> str:
        """Return no id."""
        return ""

    def annotation(self, line: JsonLine) -> TrainedTrace | None:
        """Return no annotation."""
        return None


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless the path is a folder."""
    do = "pass a run or evaluation folder, e.g. outputs/NAME"
    if not folder.exists():
        raise UserError("does not exist", where=str(folder), do=do)
    if not folder.is_dir():
        raise UserError("is a file, not a run folder", where=str(folder), do=do)
