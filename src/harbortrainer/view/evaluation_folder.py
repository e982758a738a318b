"""The folder of `harbortrainer eval`, as the pages read it (`evaluation/eval_folder.py`)."""

from collections.abc import Mapping
from pathlib import Path

from harbortrainer.evaluation.eval_folder import ABOUT, ROWS, TRANSCRIPTS
from harbortrainer.runs.trial_line import TrialLine
from harbortrainer.view.json_values import real, reals, table, whole, word
from harbortrainer.view.kept_turns import with_transcript_at
from harbortrainer.view.line_files import JsonLine
from harbortrainer.view.run_status import at_work, json_file
from harbortrainer.view.shown_trial import RunHead, TrialEntry, TrialSheet


class EvaluationFolder:
    """What `harbortrainer eval --out` wrote."""

    needs = frozenset({"task", "attempt", "outcome"})

    def trial_files(self, folder: Path) -> list[Path]:
        """See `RunKind`."""
        return [folder / ROWS]

    def metric_files(self, folder: Path) -> list[Path]:
        """See `RunKind`: an evaluation has none."""
        return []

    def line(self, row: JsonLine, file: Path) -> TrialEntry | None:
        """See `RunKind`."""
        task, attempt = word(row, "task"), whole(row, "attempt")
        if not task:
            return None
        return TrialEntry(
            trial=word(row, "trial") or f"{task}__attempt-{attempt}",
            kind="eval",
            step=attempt,
            task=task,
            task_key=word(row, "task_key"),
            group=word(row, "task_key")[:12],
            outcome=word(row, "outcome"),
            reward=real(row, "reward"),
            turns=whole(row, "turns"),
            input_tokens=whole(row, "prompt_tokens"),
            output_tokens=whole(row, "sampled_tokens"),
            seconds=real(table(row, "timings"), "total") or real(row, "seconds"),
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
        )
        return with_transcript_at(sheet, folder, TrialLine.of_attempt(row, TRANSCRIPTS).place, base_of(folder))

    def head(self, folder: Path) -> RunHead:
        """See `RunKind`."""
        about = json_file(folder / ABOUT)
        finished = (folder / "report.json").is_file()
        status = "running" if at_work(folder) else "finished" if finished else "cut off"
        rules = table(about, "rules")
        facts = [("tasks", str(len(table(about, "tasks")))), ("attempts at each", str(whole(about, "attempts")))]
        facts += [
            (name.replace("_", " "), str(rules[name]))
            for name in ("environment", "temperature")
            if rules.get(name) is not None
        ]
        return RunHead(folder.name, "evaluation", str(folder), word(about, "policy"), status, facts)


def base_of(folder: Path) -> str:
    """The model that was evaluated, without the adapter on it."""
    return word(json_file(folder / ABOUT), "policy").rpartition(" on ")[2]
