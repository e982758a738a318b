"""Lines of JSON in files: each can be read again by its place."""

import json
from pathlib import Path
from typing import NamedTuple

from harbortrainer.errors import UserError


class LinePlace(NamedTuple):
    """Where a line lies."""

    path: Path
    offset: int
    length: int


type JsonLine = dict[str, object]


def parsed_line(line: bytes, place: LinePlace) -> JsonLine:
    """One JSON object. Raises `UserError` for anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        where = f"{place.path}: the line at byte {place.offset}"
        raise UserError("cannot be read", where=where, do="take that line out, or put the file back as it was")
    return row


def line_at(place: LinePlace) -> JsonLine:
    """The line at a place. Raises `UserError` when it is no longer there."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            return parsed_line(file.read(place.length), place)
    except FileNotFoundError:
        raise UserError("is gone", where=str(place.path), do="look at the run again") from None
