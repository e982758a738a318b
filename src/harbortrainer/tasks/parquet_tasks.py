"""Tasks as rows of parquet files: `path`, the task's name, and `task_binary`, its folder as a gzipped tar archive.

Most public sets of training tasks have this format. Invariant: a row becomes the folder `path` below the target, or its
error is reported with its name; one broken row does not affect the others.
"""

import glob
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_archive import remove_tree, unpack_task
from harbortrainer.tasks.task_errors import MACHINE_ERRORS, describe, reading_task

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("path", "task_binary")
ROWS_AT_ONCE = 64
ENDING = ".parquet"
MAX_NAME = 1000
"""Most characters of a task's name."""


def require_parquet() -> None:
    """Check that the optional reader of parquet files is installed.

    Raises:
        UserError: It is not installed.
    """
    if find_spec("pyarrow") is None or find_spec("huggingface_hub") is None:
        do = "run `uv sync --extra parquet`, or `pip install 'harbortrainer[parquet]'`"
        raise UserError("not installed: pyarrow", where="tasks in parquet files", do=do)


def parquet_files(source: TaskSource) -> list[Path]:
    """Return the files of a local source, or the matches of its pattern. Raises `UserError` if none exists."""
    found = [Path(source.where)] if Path(source.where).is_file() else _matching(source.where)
    if not found:
        raise UserError("no such file", where=source.where, do="pass a parquet file or a pattern: DIR/*.parquet")
    return found


def _matching(pattern: str) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207 - the pattern may be absolute


def content_hash(files: Sequence[Path]) -> str:
    """Hash the content of the files, in this order."""
    digest = sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def download_parquet(source: TaskSource, scratch: Path) -> list[Path]:
    """Download the parquet files of a pinned dataset of the hub.

    Raises:
        UserError: The dataset does not exist, has no parquet file, or there is no network.
    """
    import httpx
    from huggingface_hub import snapshot_download

    pattern = source.part or f"*{ENDING}"
    try:
        folder = snapshot_download(
            source.where,
            repo_type="dataset",
            revision=source.at,
            allow_patterns=[pattern],
            local_dir=scratch / "hub",
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise hub_error(source, error) from error
    found = sorted(path for path in Path(folder).rglob(f"*{ENDING}"))
    if not found:
        named = str(source).partition("#")[0].removeprefix("hf:").partition("@")
        do = f"load a dataset of plain folders as a git repository: https://huggingface.co/datasets/{named[0]}@{named[2]}#."
        raise UserError(f"no file of the dataset matches {pattern}", where=str(source), do=do)
    return found


def newest_revision(source: TaskSource) -> str:
    """Return the current commit of a dataset of the hub, or of its branch or tag. Raises `UserError`."""
    import httpx
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.where, revision=source.at or None, timeout=30).sha
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise hub_error(source, error) from error
    if not commit:
        raise UserError("the hub returned no commit", where=str(source), do="add a revision: hf:ORG/NAME@REVISION")
    return commit


def hub_error(source: TaskSource, error: Exception) -> UserError:
    """Turn an error of the hub's client into one line with a remedy."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return UserError("this dataset is gated", where=str(source), do="request access, then run `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        what = "no such dataset on the hub, or it is private"
        return UserError(what, where=str(source), do="correct the name, or run `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"has no revision {source.at!r}", where=str(source), do="correct the revision")
    words = " ".join(str(error).split())[:200]
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        what = f"the hub refused the request with {error.response.status_code}: {words}"
        return UserError(what, where=str(source), do="correct the name, or try again later")
    what = f"the hub cannot be reached: {words}"
    return UserError(what, where=str(source), do="check the network, or fetch it on another machine")


def unpack_rows(files: Sequence[Path], target: Path) -> dict[str, str]:
    """Unpack every row below `target` and return the error of each broken row by its name.

    Raises:
        UserError: A file is not a parquet file or lacks a column, or two rows have the same name.
    """
    broken: dict[str, str] = {}
    seen: set[str] = set()
    above: set[str] = set()
    for file in files:
        for number, (path, packed) in enumerate(_rows(file)):
            name = _task_name(path)
            if name is None:
                what = describe(path) if isinstance(path, Exception) else repr(path)[:200]
                broken[f"row {number} of {file.name}"] = f"{what} is not a valid task name"
                continue
            parents = {str(parent) for parent in PurePosixPath(name).parents} - {"."}
            if name in seen or name in above or parents & seen:
                do = "select files by a pattern (hf:ORG/NAME@REVISION#data/train-*), or rename the rows"
                raise UserError(f"two rows are named {name}, or one is inside the other", where=str(file), do=do)
            seen.add(name)
            above |= parents
            if (what := _unpack(packed, target / name)) is not None:
                broken[name] = what
    return broken


def _unpack(packed: object, folder: Path) -> str | None:
    """Unpack a row's archive into `folder`; return its error, or None. On an error, `folder` is removed."""
    if not isinstance(packed, bytes):
        return f"{COLUMNS[1]} is not bytes"
    try:
        with reading_task(folder.name):
            folder.mkdir(parents=True)
            unpack_task(packed, folder)
    except UserError as error:
        if folder.is_dir():
            remove_tree(folder)
        return error.what
    return None


def _rows(file: Path) -> Iterator[tuple[object, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        missing = [name for name in COLUMNS if name not in table.schema_arrow.names]
        if missing:
            has = ", ".join(table.schema_arrow.names)
            raise UserError(f"has no column {missing[0]}", where=str(file), do=f"its columns are {has}")
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=list(COLUMNS)):
            yield from zip(*(_values(batch.column(name)) for name in COLUMNS), strict=True)
    except (pa.ArrowException, OSError, ValueError) as error:  # a damaged page is an OSError
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        what = " ".join(str(error).split())[:200]
        raise UserError(f"not a parquet file: {what}", where=str(file), do="write the file again") from error


def _values(column: "pa.Array") -> list[object]:
    """Return the values of a column; a value that cannot be decoded is its error, as an exception."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, or a date out of range
        return [_value(scalar) for scalar in column]


def _value(scalar: "pa.Scalar") -> object:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _task_name(path: object) -> str | None:
    """Return a row's task name, a safe relative path; None if the path is not safe."""
    if not isinstance(path, str) or not path.strip() or set(path) & set("\\\0\n") or len(path) > MAX_NAME:
        return None
    parts = PurePosixPath(path).parts
    odd = path.startswith("/") or any(part.startswith((".", "__")) for part in parts)
    return (
        None
        if odd or any(len(part.encode("utf-8", "replace")) > 200 for part in parts)
        else PurePosixPath(path).as_posix()
    )
