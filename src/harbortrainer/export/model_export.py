"""Export of a trained model into a new folder, which is written atomically.

- `adapter_config.json`, `adapter_model.safetensors`; or `config.json`, `model*.safetensors`
- tokenizer and chat template of the base
- `README.md`, `run_config.json`, `tasks.lock.json`, `reward.png`

`ModelExport.plan` does all checks without importing torch.
"""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harbortrainer import __version__
from harbortrainer.config.agent_table import TRAINABLE_TERMINUS
from harbortrainer.config.redacted_config import redact, redact_path
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.eval_folder import EvalFolder
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.evaluation.report import EvalReport, as_lines
from harbortrainer.export.model_card import TERMINUS_2, CardContent, model_card
from harbortrainer.export.trained_weights import TrainedWeights
from harbortrainer.export.vllm_fit import rank_of, vllm_obstacles
from harbortrainer.runs.comparable_evaluations import comparable_evaluations, evaluated_points, gain_between
from harbortrainer.runs.curve import as_png, curve_of
from harbortrainer.runs.durable import atomic_folder, finite, read_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.prime_rl_files import evaluation_rows, metric_files
from harbortrainer.runs.provenance import evaluated_training_tasks, evaluation_name

LOCK, CONFIG, CARD = "tasks.lock.json", "run_config.json", "README.md"


@dataclass(frozen=True)
class ModelExport:
    """An export of a policy into a folder."""

    weights: TrainedWeights
    merged: bool
    """Whether to export a whole model; else a peft adapter."""
    out: Path
    reports: tuple[str, ...] = ()
    """Text of evaluations of exactly these weights."""

    @classmethod
    def plan(
        cls, weights: TrainedWeights, *, merged: bool | None, out: Path | None, evaluated: Sequence[Path] = ()
    ) -> Self:
        """Check and return an export.

        Args:
            weights: The weights to export.
            merged: Whether to merge; None means an adapter if its base is on the hub, else a whole model.
            out: Folder of the export; None means one in `exports/` beside the run folder.
            evaluated: Evaluation folders whose reports the card gets.

        Raises:
            UserError: The folder exists, the base does not, or an evaluation is of another policy.
        """
        if merged is False and not weights.is_adapter:
            raise UserError(
                "the run trained all weights and has no adapter", where="--adapter", do="remove this option"
            )
        whole = not weights.is_adapter or (merged if merged is not None else weights.base.hub_id is None)
        folder = out or weights.run.absolute().parent / "exports" / (weights.name + "-merged" * whole)
        if folder.exists():
            raise UserError("already exists", where=str(folder), do="pass another folder with --out, or remove it")
        weights.base.check()
        return cls(weights, whole, folder, tuple(_report(path, weights) for path in evaluated))

    def write(self) -> CardContent:
        """Write the export and return the contents of its card.

        Raises:
            UserError: The weights or the base's files cannot be read.
            RunStoppedError: The disk is full or the folder cannot be written.
        """
        from harbortrainer.export import weight_files

        weights, base = self.weights, self.weights.base
        with _disk_errors(self.out), atomic_folder(self.out) as fresh:
            tensors = weight_files.adapter_tensors(weights) if weights.is_adapter else {}
            if not weights.is_adapter:
                weight_files.copy_whole_model(fresh, weights, base)
            elif self.merged:
                weight_files.write_merged(fresh, tensors, weights, base)
            else:
                weight_files.write_adapter(fresh, tensors, weights.adapter_config, base)
            weight_files.copy_tokenizer(fresh, base)
            card = self.card(list(tensors))
            (fresh / CARD).write_text(model_card(card), encoding="utf-8")
            (fresh / CONFIG).write_text(_json(redact(weights.config)), encoding="utf-8")
            (fresh / LOCK).write_text(_json(weights.provenance.tasks), encoding="utf-8")
            as_png(card.curve, fresh / "reward.png", weights.run.absolute().name)
            _copy_card_mode(fresh)
        return card

    def card(self, tensors: Sequence[str]) -> CardContent:
        """Return the contents of the card."""
        weights = self.weights
        run = RunFolder(weights.run)
        metrics = [row for file in metric_files(weights.run) for row in read_lines(file)]
        curve = curve_of(metrics, evaluation_name(weights.run))
        rows = evaluation_rows(run.path)
        evaluated = comparable_evaluations(run, rows, weights.step)
        curve.evaluated = curve.evaluated or evaluated_points(evaluated)
        made_of = weights.provenance
        origins = {name: made_of.origins.get(name) for name in made_of.tasks}
        return CardContent(
            name=weights.name,
            step=weights.step,
            engine=weights.engine,
            release=made_of.packages.get("harbortrainer", __version__),
            base=weights.base,
            rank=rank_of(weights.adapter_config) if weights.is_adapter else None,
            merged=self.merged,
            agents=_agents(weights.config),
            renderer=_text(lookup(weights.config, "orchestrator.renderer.name")),
            license=weights.base.license(),
            quantization=lookup(weights.config, "model.quantization"),
            vllm_obstacles=vllm_obstacles(weights.adapter_config, tensors) if weights.is_adapter else (),
            tasks={
                name: (_from(origin.source) if origin else "not recorded", len(made_of.tasks[name]))
                for name, origin in origins.items()
            },
            evaluations=evaluated,
            gain=gain_between(run, rows, min(evaluated, default=weights.step), weights.step),
            reports=self.reports,
            evaluated_training_tasks=evaluated_training_tasks(weights.run)[0],
            curve=curve.until(weights.step),
            packages=made_of.packages,
        )


def _agents(config: TomlTable) -> list[str]:
    """Return the names of the agents of a run's training sources."""
    sources = lookup(config, "orchestrator.train.source")
    tables = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    names = {lookup(table, "env.agent.harness.agent", TERMINUS_2) for table in tables}
    return sorted({TERMINUS_2 if name == TRAINABLE_TERMINUS else name for name in names if isinstance(name, str)})


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _json(table: object) -> str:
    return json.dumps(finite(table), indent=1, ensure_ascii=False) + "\n"


def _copy_card_mode(folder: Path) -> None:
    """Give all files the mode of the card, since safetensors creates files that only the owner can read."""
    mode = (folder / CARD).stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _from(source: str) -> str:
    return redact_path(source) if source.startswith(("/", "~")) else f"`{source}`"


def _report(folder: Path, weights: TrainedWeights) -> str:
    """Format the report of an evaluation of these weights. Raises `UserError` if it is of another policy."""
    found = EvalFolder.read(folder)
    identity = LocalModel(PolicyFiles.find(str(weights.folder))).identity()
    if found.spec.identity != identity:
        what = f"evaluates another policy ({found.spec.policy}) than step {weights.step} of {weights.run}"
        raise UserError(what, where=str(folder), do="evaluate this policy: `harbortrainer eval TASKS --model RUN`")
    report = EvalReport.of(found.spec, found.rows())
    shown = report.model_copy(update={"policy": weights.name, "tasks_dir": Path(report.tasks_dir).name})
    return "\n".join(as_lines(shown))


@contextmanager
def _disk_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write the export: {error.strerror or error}"
        raise RunStoppedError(what, do=f"free disk space for {folder}, or pass another folder with --out") from error
