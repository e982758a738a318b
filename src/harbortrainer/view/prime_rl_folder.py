"""The run folder of Prime-RL, as the pages read it: what its file monitor writes, with what our plugin adds to a trace.

    rollouts/step_N/train/all/traces.jsonl         every episode that came back while step N was made
    rollouts/step_N/train/effective/traces.jsonl   those that trained in step N, with their advantages
    rollouts/step_N/eval/all/traces.jsonl          of evaluations
    metrics.jsonl                                  of orchestrator and trainer, each its own lines

Contract: an episode's first trace is the trial. One that trained stands in two files: the later says so.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from harbortrainer.runs.trace_transcript import transcript_of
from harbortrainer.runs.transcript import Place
from harbortrainer.runs.trial_line import SeenLine, TrialLine
from harbortrainer.view.json_values import listed, reals, table, word
from harbortrainer.view.kept_turns import NEVER_KEPT, with_transcript
from harbortrainer.view.line_files import JsonLine
from harbortrainer.view.run_status import at_work, toml_file
from harbortrainer.view.shown_trial import RunHead, TrialEntry, TrialSheet
from harbortrainer.view.token_pieces import TokenPieces, tokenizer_file

FILE = re.compile(r"step_(\d+)/(train|eval)/(all|effective)/traces\.jsonl")
LOCK = "configs/.lock"


class PrimeRLFolder:
    """`outputs/<run>` of Prime-RL."""

    needs = frozenset({"id", "traces"})

    def trial_files(self, folder: Path) -> list[Path]:
        """See `RunKind`."""
        root = folder / "rollouts"
        found = [(FILE.fullmatch(str(path.relative_to(root))), path) for path in root.glob("step_*/*/*/traces.jsonl")]
        ours = [(match, path) for match, path in found if match and (match[2], match[3]) != ("eval", "effective")]
        return [path for _, path in sorted(ours, key=lambda one: (one[0][3] == "effective", int(one[0][1]), one[0][2]))]

    def metric_files(self, folder: Path) -> list[Path]:
        """See `RunKind`."""
        return [folder / "metrics.jsonl"]

    def line(self, row: JsonLine, file: Path) -> TrialEntry | None:
        """See `RunKind`."""
        step, kind, subset = file.parts[-4].removeprefix("step_"), file.parts[-3], file.parts[-2]
        try:
            seen = SeenLine.model_validate(row)
        except ValidationError:
            return None
        line = TrialLine.of_episode(
            seen, step=int(step), kind=kind, trained=subset == "effective", place=Place(str(file), 0, 0)
        )
        return entry_of(line) if line.trial else None

    def timings(self, row: JsonLine) -> Mapping[str, object]:
        """See `RunKind`."""
        return table(_record(row), "timings")

    def sheet(self, folder: Path, line: TrialEntry, row: JsonLine) -> TrialSheet:
        """See `RunKind`."""
        seen = TrialLine.of_episode(
            SeenLine.model_validate(row), step=line.step, kind=line.kind, trained=line.trained, place=Place("", 0, 0)
        )
        steps = [
            (word(one, "name"), word(one, "outcome"), reals(one, "rewards")) for one in listed(_record(row), "steps")
        ]
        sheet = TrialSheet(
            line=line,
            rewards=seen.rewards or {},
            timings=seen.timings,
            error=seen.error or "",
            steps=steps,
            truncated=seen.truncated,
            transcript=NEVER_KEPT,
        )
        traces = listed(row, "traces")
        pieces = TokenPieces(tokenizer_file(model_of_configs(folder)))
        return with_transcript(sheet, transcript_of(traces[0]), pieces) if traces else sheet

    def head(self, folder: Path) -> RunHead:
        """See `RunKind`."""
        status = "running" if at_work(folder, LOCK) else "ended"
        return RunHead(folder.name, "prime-rl", str(folder), model_of_configs(folder), status, [("engine", "Prime-RL")])


def is_prime_rl(folder: Path) -> bool:
    """Whether Prime-RL wrote this folder."""
    traces = next(folder.glob("rollouts/step_*/*/*/traces.jsonl"), None)
    return traces is not None or ((folder / "configs").is_dir() and (folder / "metrics.jsonl").is_file())


def model_of_configs(folder: Path) -> str:
    """The model that one of the run's config files names."""
    found = (toml_file(path) for path in sorted(folder.glob("configs/*.toml")))
    return next((name for config in found if (name := word(table(config, "model"), "name"))), "")


def entry_of(line: TrialLine) -> TrialEntry:
    """A trial's line for the pages."""
    return TrialEntry(
        trial=line.trial,
        kind=line.kind,
        step=line.step or 0,
        task=line.task,
        task_key=line.task_key,
        source=line.source,
        group=line.group or "",
        outcome=line.outcome,
        reward=line.reward,
        advantage=line.advantage,
        not_trained=line.not_trained or "",
        turns=line.turns,
        input_tokens=line.tokens.input,
        output_tokens=line.tokens.output,
        seconds=line.timings.get("total"),
        version=line.version,
    )


def _record(row: JsonLine) -> JsonLine:
    """Our plugin's record of the trial."""
    traces = listed(row, "traces")
    return table(table(traces[0], "info"), "harbor") if traces else {}
