"""One finished trial as a line of JSON: its outcome, its reward, and whether it trained.

Contract: `TrialRow` is the only schema of such a line. The training loop writes it (`rollouts/step_N.jsonl`,
`rollouts/eval_step_N.jsonl`, `transcripts/pending.jsonl`), and so does an evaluation (`trials.jsonl`);
`row_of_episode` makes one of an episode of Prime-RL. Lines of older releases stay readable: a field that is missing has
its default, an unknown one is ignored. Invariant: a reward stands in a row only if the trial was graded; a trial that
failed has None, not 0.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import read_lines, write_lines
from harbortrainer.runs.trace_transcript import RECORD, Trace, TraceError

UNDECIDED = "not decided yet"
"""`TrialRow.untrained` of a trial that ended after the last finished step."""
MOST_ERROR = 500
"""Characters of an error in a row."""
_REQUIRED = {"trial": "", "task": "", "outcome": ""}


class RowTokens(BaseModel):
    """Tokens of one trial, as the embedded engine counts them.

    Of an evaluation by Prime-RL all three are sums over the model calls, as the model's server counted them.
    """

    input: int = 0
    """Tokens that were fed in, counted once."""
    output: int = 0
    """Tokens that were sampled."""
    total: int = 0
    """Length of the final sequences, summed over branches."""


class RowCut(BaseModel):
    """What lies beyond `seq_len` and did not train."""

    samples: int = 0
    """Branches that are longer."""
    tokens: int = 0
    """Sampled tokens beyond it."""


class RowStep(BaseModel):
    """One step of a multi-step trial."""

    name: str = ""
    outcome: str = ""
    rewards: dict[str, float] | None = None
    """Rewards of the verifier, by name."""
    turns: int | None = None
    """Answers that the agent got; None where it does not count them."""


class TrialRow(BaseModel):
    """One finished trial."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    step: int | None = None
    """Training: the step before which the trial was trained or dropped. Evaluation of a run: the policy version. None
    if the run has not decided yet, and in an evaluation of its own."""
    attempt: int | None = None
    """Number of the attempt at the task, from 0; only in an evaluation of its own (`harbortrainer eval`)."""
    kind: str = Field(default_factory=lambda known: "train" if known.get("attempt") is None else "eval")
    """`train` or `eval`."""
    group: str | None = None
    """The group's id; None for a trial without a group."""
    advantage: float | None = None
    """None if the trial did not train."""
    not_trained: str | None = None
    """Why the trial did not train, as its writer recorded it; None for one that trained, and in an evaluation."""
    source: str = ""
    """Name of the source of the task."""
    task: str
    """The task's name."""
    task_key: str = ""
    """Hash of the task's content."""
    trial: str
    """The trial's name and its folder's; empty if no trial was started."""
    outcome: str
    """An outcome's name (`trials/outcome.py`)."""
    reward: float | None = None
    """None if the trial was not graded."""
    rewards: dict[str, float] | None = None
    """Rewards of the verifier, by name."""
    turns: int = 0
    """Answers of the model."""
    branches: int = 0
    """Leaves of the trace."""
    prompt_tokens: int = 0
    """Evaluation: tokens of all prompts, as the model's server counted them."""
    sampled_tokens: int = 0
    """Evaluation: tokens of all answers, as the model's server counted them."""
    tokens: RowTokens = Field(default_factory=RowTokens)
    truncated: bool = False
    """Whether a limit ended the trial."""
    cut: RowCut = Field(default_factory=RowCut)
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds of each phase."""
    seconds: float | None = None
    """Evaluation: seconds from the first try to the end of the last one; a trial that fails is played again."""
    version: int | None = None
    """The oldest policy version that sampled one of its tokens."""
    steps: list[RowStep] = Field(default_factory=list)
    """Steps of a multi-step trial."""
    error: str | None = None
    """The error, in one line."""
    transcript: tuple[int, int] | None = None
    """Offset and bytes of its transcript in the file of transcripts beside its line's file; None if none was kept."""

    @classmethod
    def salvage(cls, line: Mapping[str, object]) -> Self:
        """Read a line that may be damaged: a value that cannot be read is replaced by its default."""
        try:
            return cls.model_validate(line)
        except ValidationError as error:
            damaged = {one["loc"][0] for one in error.errors() if one["loc"]}
            return cls.model_validate(_REQUIRED | {key: line[key] for key in line.keys() - damaged})

    def line(self) -> dict[str, object]:
        """Return the JSON object to write: the fields that were set, in an evaluation of its own always the same."""
        return self.model_dump(mode="json", include=self.model_fields_set if self.attempt is None else EVALUATED)

    @property
    def graded(self) -> bool:
        """Whether it has a reward."""
        return self.reward is not None

    @property
    def trained(self) -> bool:
        """Whether its tokens went into an update."""
        return self.kind == "train" and self.advantage is not None and not self.untrained

    @property
    def untrained(self) -> str:
        """Why it did not train; empty if it did, and in an evaluation."""
        return UNDECIDED if self.kind == "train" and self.step is None else self.not_trained or ""

    @property
    def input_tokens(self) -> int:
        """Tokens that the model read."""
        return self.tokens.input if self.attempt is None else self.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens that the model sampled."""
        return self.tokens.output if self.attempt is None else self.sampled_tokens

    @property
    def wall_s(self) -> float | None:
        """Seconds of the whole trial; None if they were not measured."""
        return self.timings.get("total") or self.seconds


EVALUATED = {
    *("task", "task_key", "attempt", "trial", "outcome", "reward", "rewards", "turns", "prompt_tokens"),
    *("sampled_tokens", "timings", "seconds", "error", "transcript"),
}
"""The fields in a line of an evaluation's `trials.jsonl`."""


def read_rows(file: Path) -> list[TrialRow]:
    """Return the rows of a file; none if it does not exist.

    Raises:
        UserError: A line is damaged.
    """
    return [_row(file, number, line) for number, line in enumerate(read_lines(file), 1)]


def write_rows(file: Path, rows: Iterable[TrialRow]) -> None:
    """Write a whole file of rows at once."""
    write_lines(file, (row.line() for row in rows))


def _row(file: Path, number: int, line: Mapping[str, object]) -> TrialRow:
    try:
        return TrialRow.model_validate(line)
    except ValidationError as error:
        do = "remove that line, or use the release that wrote it"
        raise UserError(error.errors()[0]["msg"], where=f"{file}: line {number}", do=do) from None


class _Episode(BaseModel):
    """The fields of an episode's line that go into a row."""

    id: str
    ok: bool = False
    task: str | None = Field(None, validation_alias=AliasPath("task", "data", "name"))
    task_key: str | None = Field(None, validation_alias=AliasPath("task", "key"))
    env_id: str = Field("", validation_alias=AliasPath("env", "id"))
    env_name: str | None = Field(None, validation_alias=AliasPath("env", "name"))
    group: str | None = Field(None, validation_alias=AliasPath("group", "id"))
    version: int | None = Field(None, validation_alias=AliasPath("run", "work", "policy", "start"))
    """The policy version that was live when the episode began."""
    errors: list[TraceError] = []
    traces: list[Trace] = []


def row_of_episode(line: Mapping[str, object], *, step: int, kind: str, trained: bool) -> TrialRow | None:
    """Return the row of an episode as Prime-RL's file monitor writes it; None if the line is no episode.

    Args:
        line: A line of `prime_rl_files.episode_files`. Its first trace is the trial.
        step: The step in which it finished; of an evaluation the policy version.
        kind: `train` or `eval`.
        trained: Whether Prime-RL shipped the episode to its trainer.
    """
    try:
        episode = _Episode.model_validate(line)
        return TrialRow.model_validate(_fields(episode, kind, trained=trained) | {"step": step})
    except (ValidationError, IndexError):  # a parent that does not exist
        return None


def _fields(episode: _Episode, kind: str, *, trained: bool) -> dict[str, object]:
    trace = episode.traces[0] if episode.traces else None
    found = trace.info.get(RECORD) if trace else None
    record: dict[str, object] = found if isinstance(found, dict) else {}
    nodes = trace.nodes if trace else []
    # Prime-RL trains on the traces that are ok, also where an episode's own hook failed.
    ok = trace is not None and (episode.ok if trace.ok is None else trace.ok)
    graded = ok and record.get("reward") is not None
    sampled, branches = sum(sum(node.mask) for node in nodes), trace.branch_lengths if trace else []
    error = next(reversed([*episode.errors, *(trace.errors if trace else [])]), None)
    advantage = next((value for node in nodes for value in node.advantages or ()), 0.0)
    left_out = "left out by Prime-RL" if graded else "failed"
    outcome = record.get("outcome") if graded or record.get("reward") is None else None
    outcome = outcome or ("completed" if ok else "agent_error")
    seconds = record.get("timings")
    timings: dict[str, object] = seconds if isinstance(seconds, dict) else {}
    return {
        "kind": kind,
        "trial": record.get("trial_name") or (trace.id if trace else ""),
        "task": record.get("task") or episode.task or "",
        "task_key": record.get("task_key") or episode.task_key or "",
        "source": episode.env_name or episode.env_id,
        "group": episode.group,
        "outcome": outcome,
        "reward": record.get("reward") if graded else None,
        "rewards": record.get("rewards"),
        "advantage": advantage if trained else None,
        "not_trained": None if trained or kind == "eval" else left_out,
        "version": episode.version,
        "turns": sum(node.sampled for node in nodes),
        "branches": len(branches),
        "truncated": trace is not None and trace.is_truncated,
        "tokens": _counted_by_server(trace)
        if trace is not None and not any(node.token_ids for node in nodes)
        else RowTokens(input=sum(len(node.token_ids) for node in nodes) - sampled, output=sampled, total=sum(branches)),
        "timings": {phase: took for phase, took in timings.items() if took is not None},
        "steps": record.get("steps") or [],
        "error": f"{error.type}: {error.message}"[:MOST_ERROR] if error else None,
    }


def _counted_by_server(trace: Trace) -> RowTokens:
    """Return the tokens of a trace without token ids: Prime-RL's evaluations use chat completions."""
    usages = [call.usage for call in trace.calls if call.usage is not None and call.node is not None]
    read, sampled = sum(one.input_tokens for one in usages), sum(one.completion_tokens for one in usages)
    return RowTokens(input=read, output=sampled, total=read + sampled)
