"""A run folder with trials of every sort, their transcripts beside them, written as the embedded engine writes them."""

from pathlib import Path

from harbortrainer.runs.durable import write_lines
from harbortrainer.runs.transcript import KeptMessage, Transcript
from harbortrainer.runs.transcript_files import TranscriptBook


def shown(text: str, parent: int | None = None, *, role: str = "user") -> KeptMessage:
    """A message that the policy was shown."""
    return KeptMessage(role=role, text=text, parent=parent, token_ids=[9, *text.encode()])


def said(text: str, parent: int, *, finish: str = "stop", thinking: str | None = None) -> KeptMessage:
    """An answer of the policy: a token of the template, then what it sampled."""
    ids = list(text.encode())
    return KeptMessage(
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


TRIALS: dict[str, tuple[float | None, list[KeptMessage]]] = {
    "solved": (1.0, [shown("do it"), said("ls", 0, thinking="hm"), shown("a b", 1), said("done", 2)]),
    "the-same": (1.0, [shown("do it"), said("ls", 0, thinking="hm"), shown("a b", 1), said("done", 2)]),
    "two-steps": (1.0, [shown("step one"), said("one", 0), shown("step two"), said("two", 2), shown("bye", 3)]),
    "rewritten": (
        1.0,
        [shown("x"), said("y", 0), shown("x!"), shown("y?", 2, role="assistant"), said("z", 3)],
    ),
    "cut-off": (1.0, [shown("go"), said("went", 0), shown("on", 1), said("and on and", 2, finish="length")]),
    "tampered": (1.0, [shown("t"), said("u", 0)]),
    "half": (0.5, [shown("h"), said("i", 0)]),
    "failed": (None, [shown("f"), said("g", 0)]),
}


def played_run(run: Path, model: Path) -> Path:
    """One step with these trials, and an evaluation whose trials are all solved."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "rollouts").mkdir()
    (run / "config.toml").write_text(f'[model]\nname = "{model}"\n')
    book = TranscriptBook(run, most_mb=10)
    for name, prefix, kind in (("step_1", "", "train"), ("eval_step_1", "held-out-", "eval")):
        rows = []
        for trial, (reward, messages) in TRIALS.items():
            told = f"{prefix}{trial}"
            tools = ["python3 was replaced"] if trial == "tampered" else []
            book.add(told, Transcript(trial=told, messages=messages, changed_tools=tools).packed(), {})
            about = {"trial": told, "task": trial, "task_key": f"key-{trial}", "source": "own", "kind": kind, "step": 1}
            rows.append(about | {"outcome": "completed", "reward": reward})
        write_lines(run / "rollouts" / f"{name}.jsonl", book.write(name, rows))
    return run
