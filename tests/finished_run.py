"""A finished run of the embedded engine: one step and one evaluation, with rows and transcripts of every kind."""

from pathlib import Path

from harbortrainer.runs.transcript import Transcript, TranscriptMessage
from harbortrainer.runs.transcript_files import TranscriptWriter
from harbortrainer.runs.trial_row import TrialRow, write_rows


def context(text: str, parent: int | None = None, *, role: str = "user") -> TranscriptMessage:
    """Return a message that the policy did not sample."""
    return TranscriptMessage(role=role, text=text, parent=parent, token_ids=[9, *text.encode()])


def answer(text: str, parent: int, *, finish: str = "stop", thinking: str | None = None) -> TranscriptMessage:
    """Return an answer of the policy: one token of the template, then the sampled tokens."""
    ids = list(text.encode())
    return TranscriptMessage(
        role="assistant",
        text=text,
        thinking=thinking,
        parent=parent,
        sampled=True,
        token_ids=[8, *ids],
        spans=[1, len(ids)],
        logprobs=[-0.5] * len(ids),
        sampled_len=len(ids),
        finish=finish,
    )


TRIALS: dict[str, tuple[float | None, list[TranscriptMessage]]] = {
    "solved": (1.0, [context("do it"), answer("ls", 0, thinking="hm"), context("a b", 1), answer("done", 2)]),
    "the-same": (1.0, [context("do it"), answer("ls", 0, thinking="hm"), context("a b", 1), answer("done", 2)]),
    "two-steps": (
        1.0,
        [context("step one"), answer("one", 0), context("step two"), answer("two", 2), context("bye", 3)],
    ),
    "rewritten": (
        1.0,
        [context("x"), answer("y", 0), context("x!"), context("y?", 2, role="assistant"), answer("z", 3)],
    ),
    "cut-off": (1.0, [context("go"), answer("went", 0), context("on", 1), answer("and on and", 2, finish="length")]),
    "cut-early": (
        1.0,
        [context("go"), answer("and on", 0, finish="length"), context("shorter", 1), answer("fine", 2)],
    ),
    "tampered": (1.0, [context("t"), answer("u", 0)]),
    "half": (0.5, [context("h"), answer("i", 0)]),
    "failed": (None, [context("f"), answer("g", 0)]),
}


def write_finished_run(run: Path, model: Path) -> Path:
    """Write a run folder in which each of `TRIALS` is both a training trial and a held-out trial."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "rollouts").mkdir()
    (run / "config.toml").write_text(f'[model]\nname = "{model}"\n')
    writer = TranscriptWriter(run, max_mb=10)
    for file, prefix, kind in (("step_1", "", "train"), ("eval_step_1", "held-out-", "eval")):
        rows = []
        for trial, (reward, messages) in TRIALS.items():
            name = f"{prefix}{trial}"
            tools = ["python3 was replaced"] if trial == "tampered" else []
            row = TrialRow(
                step=1,
                kind=kind,
                source="own",
                task=trial,
                task_key=f"key-{trial}",
                trial=name,
                outcome="completed",
                reward=reward,
            )
            writer.add(Transcript(trial=name, messages=messages, changed_tools=tools).packed(), row)
            rows.append(row)
        write_rows(run / "rollouts" / f"{file}.jsonl", writer.write(file, rows))
    return run
