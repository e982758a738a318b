"""`harbortrainer export`: write the trained model, or a dataset of successful trials."""

import sys
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.engines.engine_choice import require_extra
from harbortrainer.engines.prime_rl.checkout import apply_dotenv
from harbortrainer.errors import UserError
from harbortrainer.export.hub_push import HubRepo
from harbortrainer.export.model_card import CardContent
from harbortrainer.export.model_export import ModelExport
from harbortrainer.export.sft_dataset import SftDataset
from harbortrainer.export.trained_weights import TrainedWeights
from harbortrainer.runs.display import loading, plural


@dataclass(frozen=True)
class ExportOrder:
    """Options of the command."""

    run: Path
    step: int | None
    merged: bool | None
    out: Path | None
    evaluated: tuple[Path, ...] = ()
    repo: HubRepo | None = None


def export_run(order: ExportOrder) -> int:
    """Export the model and print what was written.

    Raises:
        UserError: The export is not possible; nothing was written.
    """
    weights = TrainedWeights.find(order.run, order.step)
    for line in weights.passed_over:
        print(f"warning: {line}", file=sys.stderr)
    export = ModelExport.plan(weights, merged=order.merged, out=order.out, evaluated=order.evaluated)
    require_extra("torch", "transformers", "peft", "huggingface_hub")
    if order.repo is not None:
        apply_dotenv()
        order.repo.check()
    with loading("torch and the weights", "torch"):
        card = export.write()
    print_export(export, card, format_given=order.merged is not None)
    if order.repo is not None:
        print(f"uploaded: {order.repo.push(export.out)}")
    return 0


def export_trials(run: Path, file: Path, *, min_reward: float, alone: bool) -> int:
    """Write a run's successful trials as an SFT dataset and print a summary.

    Args:
        run: Run folder.
        file: JSONL file to write.
        min_reward: Minimum reward of a trial.
        alone: No option of a model export was given.

    Raises:
        UserError: The export is not possible; nothing was written.
    """
    if not alone:
        raise UserError(
            "--sft writes a dataset, not a model", where="harbortrainer export", do="export them one at a time"
        )
    found = SftDataset.write(run, file, min_reward=min_reward)
    trials, tasks = plural(found.trials, "trial"), plural(len(found.tasks), "task")
    print(f"{plural(found.rows, 'conversation')} from {trials} of {tasks}: {file}")
    if found.left_out:
        print(f"left out: {found.reasons}")
    return 0


def print_export(export: ModelExport, card: CardContent, *, format_given: bool) -> None:
    """Print what was written. `format_given`: the user passed --merged or --adapter."""
    base = card.base.hub_id or "a base model that is not on the hub"
    wrote = f"wrote {export.out}: step {card.step}"
    if card.merged:
        print(f"{wrote}, merged into {base}" if card.rank else wrote)
        if card.rank and not format_given:
            print("merged because the base model is a local folder; use --adapter to write only the adapter")
        return
    print(f"{wrote}, a LoRA of rank {card.rank} on {base}")
    if card.vllm_obstacles:
        print(f"warning: vLLM cannot serve this adapter ({'; '.join(card.vllm_obstacles)}); export with --merged")
