"""Tasks as rows of parquet files: `path`, the task's name, and `task_binary`, its folder as a gzipped tar archive.

That is how most public sets of training tasks are kept. Invariant: a row becomes the folder of its `path` below the
target, or what is wrong with it is told beside its name; one broken row loses no other.
"""

import glob
import shutil
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_archive import unpack_task

COLUMNS = ("path", "task_binary")
ROWS_AT_ONCE = 64
ENDING = ".parquet"


def need_parquet() -> None:
    """The reader of parquet files is an extra.

    Raises:
        UserError: It is not installed.
    """
    if find_spec("pyarrow") is None or find_spec("huggingface_hub") is None:
        do = "run `uv sync --extra parquet`, or `pip install 'harbortrainer[parquet]'`"
        raise UserError("not installed: pyarrow", where="tasks in parquet files", do=do)


def parquet_files(source: TaskSource) -> list[Path]:
    """The files of a local source: the one, or those that its pattern names. Raises `UserError` when there is none."""
    found = [Path(source.where)] if Path(source.where).is_file() else _matching(source.where)
    if not found:
        raise UserError("no such file", where=source.where, do="name a parquet file, or several: DIR/*.parquet")
    return found


def _matching(pattern: str) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207 - it may be absolute


def content_of(files: Sequence[Path]) -> str:
    """A hash of the content of some files, in this order."""
    digest = sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def download_parquet(source: TaskSource, scratch: Path) -> list[Path]:
    """The parquet files of a dataset of the hub, which must be pinned.

    Raises:
        UserError: No such dataset, none of its files is parquet, or no network.
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
        do = f"a dataset of plain folders is a git repository: https://huggingface.co/datasets/{named[0]}@{named[2]}#."
        raise UserError(f"none of its files is {pattern}", where=str(source), do=do)
    return found


def newest_revision(source: TaskSource) -> str:
    """The commit that a dataset of the hub is at now, or that a branch or tag of it names. Raises `UserError`."""
    import httpx
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.where, revision=source.at or None, timeout=30).sha
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise hub_error(source, error) from error
    if not commit:
        raise UserError("the hub names no commit of it", where=str(source), do="name a revision: hf:ORG/NAME@REVISION")
    return commit


def hub_error(source: TaskSource, error: Exception) -> UserError:
    """What the hub's client says, as one line."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return UserError("its owner lets only some in", where=str(source), do="ask for access, and run `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        what = "no such dataset on the hub, or a private one"
        return UserError(what, where=str(source), do="correct the name, or run `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"it has no revision {source.at!r}", where=str(source), do="correct the revision")
    what = f"the hub cannot be reached: {' '.join(str(error).split())[:200]}"
    return UserError(what, where=str(source), do="look at the network, or fetch it elsewhere")


def unpack_rows(files: Sequence[Path], target: Path) -> dict[str, str]:
    """Unpack every row below `target`; what is wrong with each that could not be, by its name.

    Raises:
        UserError: A file is no parquet file, lacks a column, or two rows have one name.
    """
    broken: dict[str, str] = {}
    seen: set[str] = set()
    above: set[str] = set()
    for file in files:
        for number, (path, packed) in enumerate(_rows(file)):
            name = _name_of(path)
            if name is None:
                broken[f"row {number} of {file.name}"] = f"{path!r} is no name of a task"
                continue
            parents = {str(parent) for parent in PurePosixPath(name).parents} - {"."}
            if name in seen or name in above or parents & seen:
                do = "leave files out by a pattern (hf:ORG/NAME@REVISION#data/train-*), or name the rows apart"
                raise UserError(f"two rows are called {name}, or one lies in the other", where=str(file), do=do)
            seen.add(name)
            above |= parents
            if (what := _unpack(packed, target / name)) is not None:
                broken[name] = what
    return broken


def _unpack(packed: object, folder: Path) -> str | None:
    """What is wrong with a row's archive; None when its task lies in `folder`, which is not there else."""
    if not isinstance(packed, bytes):
        return f"{COLUMNS[1]} holds no bytes"
    folder.mkdir(parents=True)
    try:
        unpack_task(packed, folder)
    except UserError as error:
        shutil.rmtree(folder)
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
            yield from zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True)
    except pa.ArrowException as error:
        what = " ".join(str(error).split())[:200]
        raise UserError(f"not a parquet file: {what}", where=str(file), do="have it written again") from error


def _name_of(path: object) -> str | None:
    """The name of a row's task, a relative path without surprises; None when it has no such name."""
    if not isinstance(path, str) or not path.strip() or set(path) & set("\\\0\n"):
        return None
    parts = PurePosixPath(path).parts
    odd = path.startswith("/") or any(part.startswith((".", "__")) for part in parts)
    return None if odd or any(len(part.encode()) > 200 for part in parts) else PurePosixPath(path).as_posix()
