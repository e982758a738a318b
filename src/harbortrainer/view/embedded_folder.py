"""The run folder of the embedded engine, as the pages read it (`docs/run-folder.md`)."""

import re
from collections.abc import Mapping
from pathlib import Path

from harbortrainer.runs.transcript_files import FOLDER, PENDING
from harbortrainer.runs.trial_line import UNDECIDED, TrialLine
from harbortrainer.view.json_values import listed, real, reals, table, whole, word
from harbortrainer.view.kept_turns import with_transcript_at
from harbortrainer.view.line_files import JsonLine
from harbortrainer.view.run_status import at_work, json_file, toml_file
from harbortrainer.view.shown_trial import OPEN, RunHead, TrialEntry, TrialSheet
from harbortrainer.view.spoken import duration

STEP_FILE = re.compile(r"(eval_)?step_(\d+)\.jsonl")


class EmbeddedFolder:
    """`outputs/<run>` of the embedded engine."""

    needs = frozenset({"trial", "task", "outcome"})

    def trial_files(self, folder: Path) -> list[Path]:
        """See `RunKind`."""
        found = [(match, path) for path in folder.glob("rollouts/*.jsonl") if (match := STEP_FILE.fullmatch(path.name))]
        ordered = [path for _, path in sorted(found, key=lambda one: (int(one[0][2]), bool(one[0][1])))]
        return [*ordered, folder / FOLDER / f"{PENDING}.jsonl"]

    def metric_files(self, folder: Path) -> list[Path]:
        """See `RunKind`."""
        return [folder / "metrics.jsonl"]

    def line(self, row: JsonLine, file: Path) -> TrialEntry | None:
        """See `RunKind`."""
        if not word(row, "trial"):
            return None
        tokens = table(row, "tokens")
        return TrialEntry(
            trial=word(row, "trial"),
            kind=word(row, "kind") or "train",
            step=OPEN if row.get("step") is None else whole(row, "step"),
            task=word(row, "task"),
            task_key=word(row, "task_key"),
            source=word(row, "source"),
            group=word(row, "group"),
            outcome=word(row, "outcome"),
            reward=real(row, "reward"),
            advantage=real(row, "advantage"),
            not_trained=UNDECIDED if undecided(row) else word(row, "not_trained"),
            turns=whole(row, "turns"),
            input_tokens=whole(tokens, "input"),
            output_tokens=whole(tokens, "output"),
            seconds=real(table(row, "timings"), "total"),
            version=whole(row, "version") if row.get("version") is not None else None,
        )

    def timings(self, row: JsonLine) -> Mapping[str, object]:
        """See `RunKind`."""
        return table(row, "timings")

    def sheet(self, folder: Path, line: TrialEntry, row: JsonLine) -> TrialSheet:
        """See `RunKind`."""
        sheet = TrialSheet(
            line=line,
            rewards=reals(row, "rewards"),
            timings=reals(row, "timings"),
            error=word(row, "error"),
            steps=[
                (word(step, "name"), word(step, "outcome"), reals(step, "rewards")) for step in listed(row, "steps")
            ],
            truncated=row.get("truncated") is True,
            cut_tokens=whole(table(row, "cut"), "tokens"),
        )
        name = PENDING if line.step == OPEN else f"{'eval_' if line.kind == 'eval' else ''}step_{line.step}"
        place = TrialLine.of_rollout(row, name).place
        return with_transcript_at(sheet, folder, place, str(folder / "model"), model_of(folder))

    def head(self, folder: Path) -> RunHead:
        """See `RunKind`."""
        summary, config = json_file(folder / "summary.json"), toml_file(folder / "config.toml")
        status = "running" if at_work(folder) else word(summary, "status") or "cut off"
        facts = [("engine", "embedded")]
        if (wall := real(summary, "wall_s")) is not None:
            facts.append(("time", duration(wall)))
        if (peak := real(summary, "peak_rss_mb")) is not None:
            facts.append(("peak memory", f"{peak / 1000:.1f} GB"))
        model = word(table(config, "model"), "name") or word(summary, "model")
        planned = whole(config, "max_steps")
        facts += [("steps planned", str(planned))] if planned else []
        return RunHead(folder.name, "run", str(folder), model, status, facts)


def undecided(row: JsonLine) -> bool:
    """Whether it is not known yet if a trial will train."""
    return row.get("step") is None and word(row, "kind") != "eval"


def model_of(folder: Path) -> str:
    """The model that the run's config names."""
    return word(table(toml_file(folder / "config.toml"), "model"), "name")
