"""The files of a Prime-RL run, in the two layouts that it has written (`docs/run-folder.md` has them as a table).

- Per step: up to v0.9.1.dev28, so also the pinned 559b44772 (src/prime_rl/monitors/file.py).

      rollouts/step_N/train/all/traces.jsonl         every episode that finished during step N
      rollouts/step_N/train/effective/traces.jsonl   the episodes trained on in step N, with their advantages
      rollouts/step_N/eval/all/traces.jsonl          evaluation episodes
      metrics.jsonl, configs/NAME.json

  Our launcher seals the files of old steps, and reduces those of the oldest to rows (`episode_limit.py`).

- Stream: from v0.9.1.dev29 on (src/prime_rl/monitors/file/ at 551bfc39b; releases up to dev46 kept it elsewhere, see
  `STREAM_ROOTS`). Written from the source; not run.

      monitors/file/traces/stream/NNNNN.jsonl             every episode, in the order of arrival; sealed ones with .zst
      monitors/file/traces/annotations/NAME.index.jsonl   what became known later about a trace: its step and advantage
      monitors/file/traces/annotations/NAME/NNNNN.jsonl   the same with values per token; the index has the offset
      monitors/file/metrics.jsonl, configs/latest/resolved/NAME.json

Contract: no other module knows these paths. Episode files are named by their plain path (`sealed_files.py`).
Invariant: an episode gives the same row and transcript in both layouts, once its annotation is applied. Only the
advantage of a row whose tokens have several differs: the first one per step, the mean in a stream.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import AliasPath, BaseModel, Field, ValidationError

from harbortrainer.runs.durable import line_of
from harbortrainer.runs.sealed_files import numbered_files, open_lines, plain_path
from harbortrainer.runs.trace_transcript import Trace, TraceNode, transcript_of
from harbortrainer.runs.transcript import Transcript
from harbortrainer.runs.trial_row import TrialRow, row_of_episode

STEP_EPISODES = re.compile(r"step_(\d+)/(train|eval)/(all|effective)/traces\.jsonl")
STREAM_ROOTS = ("monitors/file", ".")
"""Folders that the stream layout has used for `traces/`."""
ANNOTATION_INDEX = ".index.jsonl"
CONFIG_FOLDERS = ("configs/latest/resolved", "configs/resolved", "configs")
CONFIG_TABLES = ("trainer", "orchestrator", "inference")
"""Tables of a run, each in the file `NAME.json` for the process of that name; `inference` only if `rl` starts it."""
WHOLE_CONFIG = "rl"
"""Name of the file that has all tables, beside or instead of their own files."""
ROW = "row"
"""Field of a reduced episode: its row. Such an episode has no traces."""
WEIGHTS_COMPLETE = ("STABLE", ".finished")
"""Files that mark the weights of `broadcasts/step_N/` as complete, per step and stream layout."""


def has_episodes(run: Path) -> bool:
    """Return whether a folder has the episodes of a Prime-RL run."""
    return next(_step_files(run), None) is not None or any(_stream_files(run))


def episode_files(run: Path) -> list[Path]:
    """Return the files with one line per episode. An episode that is in two files has its last state in the later."""
    ours = [(match, path) for match, path in _matched_files(run) if (match[2], match[3]) != ("eval", "effective")]
    ours.sort(key=lambda one: (one[0][3] == "effective", int(one[0][1]), one[0][2]))
    return [path for _, path in ours] + _stream_files(run)


def step_files(run: Path) -> list[tuple[int, Path]]:
    """Return each file of episodes in the layout per step with its step, the oldest first, also copies for nobody."""
    return sorted((int(match[1]), path) for match, path in _matched_files(run))


def training_files(run: Path) -> list[Path]:
    """Return the files with every training episode, once each; a stream also has evaluations."""
    return [file for file in episode_files(run) if file.parts[-3:-1] in {("train", "all"), ("traces", "stream")}]


def annotation_files(run: Path) -> list[Path]:
    """Return the files with one line per annotation of a trace, without its values per token."""
    folders = [run / root / "traces/annotations" for root in STREAM_ROOTS]
    return [path for folder in folders for path in sorted(folder.glob(f"*{ANNOTATION_INDEX}"))]


def metric_files(run: Path) -> list[Path]:
    """Return the files with the metrics of a run."""
    return [run / root / "metrics.jsonl" for root in reversed(STREAM_ROOTS)]


def growing_files(run: Path) -> Iterator[Path]:
    """Yield the files to which Prime-RL appends each returned episode."""
    yield from run.glob("rollouts/step_*/*/all/traces.jsonl")
    for root in STREAM_ROOTS:
        yield from (run / root / "traces").glob("stream.index.jsonl")
        yield from (run / root / "traces").glob("stream/*.jsonl")


def config_files(run: Path) -> dict[str, Path]:
    """Return the files of the resolved config by table; `WHOLE_CONFIG` only if the tables have no files."""
    for folder in CONFIG_FOLDERS:
        named = {name: run / folder / f"{name}.json" for name in (*CONFIG_TABLES, WHOLE_CONFIG)}
        found = {name: file for name, file in named.items() if file.is_file()}
        if tables := {name: file for name, file in found.items() if name != WHOLE_CONFIG} or found:
            return tables
    return {}


def launch_files(run: Path) -> list[Path]:
    """Return the run files that the launcher copied into the folder."""
    return [*sorted(run.glob("configs/*.toml")), *sorted(run.glob("configs/latest/*.toml"))]


def _matched_files(run: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for path in _step_files(run):
        if match := STEP_EPISODES.fullmatch(str(path.relative_to(run / "rollouts"))):
            yield match, path


def _step_files(run: Path) -> Iterator[Path]:
    """Yield the plain paths of the files, which may be sealed."""
    yield from {plain_path(path) for path in run.glob("rollouts/step_*/*/*/traces.jsonl*")}


def _stream_files(run: Path) -> list[Path]:
    return [path for root in STREAM_ROOTS for path in numbered_files(run / root / "traces/stream")]


class _Arrival(BaseModel):
    """The fields of an episode in the stream that place it in the run."""

    work_kind: str = Field("", validation_alias=AliasPath("run", "work", "type"))
    work_step: int = Field(0, validation_alias=AliasPath("run", "work", "step"))
    """The step that started it. Of an evaluation the policy version."""
    kind: str = Field("", validation_alias=AliasPath("traces", 0, "info", "kind"))
    step: int | None = Field(None, validation_alias=AliasPath("traces", 0, "info", "arrival", "step"))
    """The step during which it finished. Of an evaluation the policy version."""


def row_of_line(line: Mapping[str, object], file: Path) -> TrialRow | None:
    """Return the row of an episode; None if the line is no episode. In a stream, its annotation is not applied yet.

    Args:
        line: A line of one of `episode_files`.
        file: That file. Evaluations in the folder of step N are of policy version N - 1.
    """
    if isinstance(row := line.get(ROW), dict):
        return TrialRow.salvage(row)
    if (match := STEP_EPISODES.fullmatch("/".join(file.parts[-4:]))) is not None:
        step, kind = int(match[1]), match[2]
        version = max(0, step - 1)
        return row_of_episode(
            line, step=step if kind == "train" else version, kind=kind, trained=match[3] == "effective"
        )
    try:
        arrival = _Arrival.model_validate(line)
    except ValidationError:
        return None
    kind, step = arrival.kind or arrival.work_kind, arrival.work_step if arrival.step is None else arrival.step
    return row_of_episode(line, step=step, kind="eval" if kind == "eval" else "train", trained=False)


def episode_of(content: bytes) -> dict[str, object]:
    """Parse an episode's line; empty for a line that is still being written or was cut."""
    try:
        episode = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return episode if isinstance(episode, dict) else {}


def reduced_episode(content: bytes, file: Path) -> bytes:
    """Return an episode's line with its row in place of its traces; a line that is no episode stays as it is."""
    episode = episode_of(content)
    row = row_of_line(episode, file)
    return content if row is None else line_of({"id": episode["id"], "traces": [], ROW: row.line()}).encode()


def is_reduced(line: Mapping[str, object]) -> bool:
    """Return whether an episode's line has its row only."""
    return ROW in line


def evaluation_rows(run: Path) -> list[TrialRow]:
    """Return the evaluation trials of a run, once each. Their step is the policy version."""
    found: dict[str, TrialRow] = {}
    for file in episode_files(run):
        if file.parts[-3:-1] in {("eval", "all"), ("traces", "stream")}:
            with open_lines(file) as lines:
                rows = (row_of_line(episode_of(content), file) for content in lines)
                found |= {row.trial: row for row in rows if row is not None and row.trial and row.kind == "eval"}
    return list(found.values())


class _FirstTrace(BaseModel):
    id: str = Field("", validation_alias=AliasPath("traces", 0, "id"))


def trace_of_line(line: Mapping[str, object]) -> str:
    """Return the id of an episode's first trace, which is the trial; empty if there is none."""
    try:
        return _FirstTrace.model_validate(line).id
    except ValidationError:
        return ""


class TrainedTrace(BaseModel):
    """Annotation of a trace that Prime-RL shipped to its trainer."""

    trace: str = Field(validation_alias="trace_id")
    effective: bool = Field(validation_alias=AliasPath("info", "effective"))
    step: int = Field(validation_alias=AliasPath("info", "ship", "step"))
    """The step whose batch has it."""
    advantage: float = Field(0.0, validation_alias=AliasPath("info", "advantage"), allow_inf_nan=False)
    chunk: int = 0
    offset: int = 0
    """Place of the annotation with values per token."""


class _Branch(BaseModel):
    """The values of one conversation, from its root to a leaf."""

    index: int
    """Position of the leaf among the leaves."""
    advantages: list[float | None] = []
    """[T] of all its tokens; None for a token that was not trained on."""


class _TokenValues(BaseModel):
    """The values per token in an annotation."""

    branches: list[_Branch] = []


def trained_trace(line: Mapping[str, object]) -> TrainedTrace | None:
    """Return the annotation in a line of `annotation_files`; None if it is about something else."""
    try:
        found = TrainedTrace.model_validate(line)
    except ValidationError:
        return None
    return found if found.effective else None


def transcript_of_line(run: Path, line: Mapping[str, object]) -> Transcript | None:
    """Return the transcript of an episode's first trace, with its annotated advantages; None if it has no trace."""
    traces = line.get("traces")
    if not isinstance(traces, list) or not traces:
        return None
    trace = Trace.model_validate(traces[0])
    for branch in _annotated_branches(run, trace.id):
        _set_advantages(trace.nodes, branch)
    return transcript_of(trace)


def _annotated_branches(run: Path, trace: str) -> Iterator[_Branch]:
    """Yield the annotated branches of a trained trace, in the order of writing. Unreadable files are left out."""
    for index in annotation_files(run):
        with suppress(OSError, ValueError), index.open("rb") as lines:
            whole = [line for line in lines if trace.encode() in line and line.endswith(b"\n")]
            for found in filter(None, map(trained_trace, map(json.loads, whole))):
                chunk = index.with_name(index.name.removesuffix(ANNOTATION_INDEX)) / f"{found.chunk:05d}.jsonl"
                with open_lines(chunk) as file:
                    file.seek(found.offset)
                    yield from _TokenValues.model_validate_json(file.readline()).branches


def _set_advantages(nodes: Sequence[TraceNode], branch: _Branch) -> None:
    """Set the advantages of the sampled tokens of a branch; a message without all of its values keeps its own."""
    parents = {node.parent for node in nodes}
    leaves = [index for index in range(len(nodes)) if index not in parents]
    path: list[TraceNode] = []
    at = leaves[branch.index] if branch.index < len(leaves) else None
    while at is not None:
        path.append(nodes[at])
        at = nodes[at].parent
    values = iter(branch.advantages)
    for node in reversed(path):
        own = [value for sampled, value in zip(node.mask, values, strict=False) if sampled]
        known = [value for value in own if value is not None]
        if known and len(known) == len(own) == sum(node.mask):
            node.advantages = known
