"""One trial as a run folder, an evaluation or Prime-RL lists it: what came of it, and where its transcript lies.

Contract: one form for the three kinds of line there are (`rollouts/step_N.jsonl` of the embedded engine, `trials.jsonl`
of an evaluation, an episode of Prime-RL's). Invariant: a reward stands here only where the line has one; a trial that
failed has none, not 0.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from harbortrainer.runs.trace_transcript import RECORD, SeenError, SeenTrace
from harbortrainer.runs.transcript import Place
from harbortrainer.runs.transcript_files import place_of

UNDECIDED = "not decided yet"
"""Why a trial did not train that ended after the last finished step."""


class LineTokens(BaseModel):
    """Tokens of one trial, as the embedded engine counts them."""

    input: int = 0
    output: int = 0
    total: int = 0


class TrialLine(BaseModel):
    """One trial."""

    model_config = ConfigDict(extra="ignore")

    trial: str
    """Its name; empty when none was started."""
    task: str = ""
    task_key: str = ""
    """Hash of the task's content."""
    source: str = ""
    kind: str = "train"
    """`train` or `eval`."""
    step: int | None = None
    """Before which it was decided what becomes of it, or whose policy it evaluated; None while that is open."""
    group: str | None = None
    attempt: int | None = None
    """Of an evaluation: which attempt at its task, from 0."""
    outcome: str
    reward: float | None = None
    """None when it cannot be graded."""
    rewards: dict[str, float] | None = None
    """What the verifier gave, by name."""
    advantage: float | None = None
    """None when it did not train."""
    not_trained: str | None = None
    """Why it did not train; None for one that did, and of an evaluation."""
    version: int | None = None
    """The oldest policy version that sampled one of its tokens."""
    turns: int = 0
    tokens: LineTokens = LineTokens()
    truncated: bool = False
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds of each phase."""
    error: str | None = None
    """What went wrong, in one line."""
    place: Place | None = None
    """Where its transcript lies; None when none was kept."""

    @property
    def trained(self) -> bool:
        """Whether the policy learned from it."""
        return self.kind == "train" and self.advantage is not None

    @classmethod
    def of_rollout(cls, row: dict[str, object], name: str) -> Self:
        """From a line of the file `NAME.jsonl` in `rollouts/` or `transcripts/`."""
        line = cls.model_validate(row)
        own: dict[str, object] = {"place": _place(name, row.get("transcript"))}
        if line.step is None and line.kind == "train":
            own["not_trained"] = UNDECIDED
        return line.model_copy(update=own)

    @classmethod
    def of_attempt(cls, row: dict[str, object], file: str) -> Self:
        """From a line of an evaluation's `trials.jsonl`; `file` holds its transcripts."""
        line, at = cls.model_validate(row), row.get("transcript")
        prompts, sampled = (int(str(row.get(key) or 0)) for key in ("prompt_tokens", "sampled_tokens"))
        tokens = LineTokens(input=prompts, output=sampled, total=prompts + sampled)
        place = Place(file, *at) if isinstance(at, list) else None
        return line.model_copy(update={"kind": "eval", "tokens": tokens, "place": place})

    @classmethod
    def of_episode(cls, episode: "SeenLine", *, step: int, kind: str, trained: bool, place: Place) -> Self:
        """From an episode that Prime-RL wrote down.

        Args:
            episode: Its line.
            step: Whose folder it lies in.
            kind: `train` or `eval`.
            trained: Whether it is among those that were shipped to the trainer.
            place: Of the line.
        """
        trace = episode.traces[0] if episode.traces else None
        record = _record(trace)
        error = (trace.errors[-1] if trace and trace.errors else None) or (episode.errors or [None])[-1]
        graded = record.reward is not None and episode.ok
        advantage = next((value for node in trace.nodes for value in node.advantages or ()), 0.0) if trace else 0.0
        sampled = sum(sum(node.mask) for node in trace.nodes) if trace else 0
        total = sum(len(node.token_ids) for node in trace.nodes) if trace else 0
        reason = None if trained or kind == "eval" else ("left out by Prime-RL" if graded else "failed")
        return cls(
            trial=record.trial_name or (trace.id if trace else ""),
            task=record.task or episode.task.data.name or "",
            task_key=record.task_key or episode.task.key or "",
            source=episode.env.name or episode.env.id,
            kind=kind,
            step=step,
            group=episode.group.id if episode.group else None,
            outcome=record.outcome or ("completed" if episode.ok else "agent_error"),
            reward=record.reward if graded else None,
            rewards=record.rewards,
            advantage=advantage if trained else None,
            not_trained=reason,
            version=episode.version,
            turns=sum(node.sampled for node in trace.nodes) if trace else 0,
            tokens=LineTokens(input=total - sampled, output=sampled, total=total),
            timings={phase: took for phase, took in (record.timings or {}).items() if took is not None},
            error=f"{error.type}: {error.message}"[:500] if error else None,
            place=place,
        )


class SeenTaskData(BaseModel):
    name: str | None = None


class SeenTask(BaseModel):
    key: str | None = None
    data: SeenTaskData = SeenTaskData()


class SeenEnv(BaseModel):
    id: str = ""
    name: str | None = None


class SeenGroup(BaseModel):
    id: str


class SeenPolicy(BaseModel):
    start: int


class SeenWork(BaseModel):
    policy: SeenPolicy | None = None


class SeenRun(BaseModel):
    work: SeenWork | None = None


class SeenLine(BaseModel):
    """An episode as Prime-RL's file monitor writes it (`rollouts/step_N/train/all/traces.jsonl`)."""

    id: str
    ok: bool = False
    task: SeenTask = SeenTask()
    env: SeenEnv = SeenEnv()
    group: SeenGroup | None = None
    run: SeenRun | None = None
    errors: list[SeenError] = []
    traces: list[SeenTrace] = []

    @property
    def version(self) -> int | None:
        """The policy version that was live when it was begun."""
        work = self.run.work if self.run else None
        return work.policy.start if work and work.policy else None


class SeenTrial(BaseModel):
    """What of the trial's record stands in its line."""

    trial_name: str = ""
    task: str = ""
    task_key: str = ""
    outcome: str = ""
    reward: float | None = None
    rewards: dict[str, float] | None = None
    timings: dict[str, float | None] | None = None


def _record(trace: SeenTrace | None) -> SeenTrial:
    return SeenTrial.model_validate((trace.info.get(RECORD) if trace else None) or {})


def _place(name: str, at: object) -> Place | None:
    return place_of(name, at) if isinstance(at, list) else None
