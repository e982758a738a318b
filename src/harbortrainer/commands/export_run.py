"""`harbortrainer export`: what a run trained, as others load it."""

import os
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.engines.engine_choice import need_extra
from harbortrainer.engines.prime_rl.command import dotenv
from harbortrainer.errors import UserError
from harbortrainer.export.hub_push import HubRepo
from harbortrainer.export.model_card import CardContent
from harbortrainer.export.model_export import ModelExport
from harbortrainer.export.sft_dataset import SftDataset
from harbortrainer.export.trained_weights import TrainedWeights
from harbortrainer.runs.loading import loading


@dataclass(frozen=True)
class ExportOrder:
    """What the command line asks for."""

    run: Path
    step: int | None
    merged: bool | None
    out: Path | None
    evaluated: tuple[Path, ...] = ()
    repo: HubRepo | None = None


def export_run(order: ExportOrder) -> int:
    """Write the export and say what it is.

    Raises:
        UserError: It cannot be; nothing was written.
    """
    weights = TrainedWeights.find(order.run, order.step)
    export = ModelExport.planned(weights, merged=order.merged, out=order.out, evaluated=order.evaluated)
    need_extra("torch", "transformers", "peft", "huggingface_hub")
    if order.repo is not None:
        os.environ.update({key: value for key, value in dotenv().items() if key not in os.environ})
        order.repo.check()
    loading("torch and the weights", "torch")
    tell(export, export.write(), asked=order.merged is not None)
    if order.repo is not None:
        print(f"on the hub: {order.repo.push(export.out)}")
    return 0


def export_trials(run: Path, file: Path, *, min_reward: float, alone: bool) -> int:
    """Write a run's good trials as a dataset and say what is in it; `alone`: nothing about a model was asked for.

    Raises:
        UserError: It cannot be; nothing was written.
    """
    if not alone:
        raise UserError(
            "--sft writes a dataset and no model", where="harbortrainer export", do="ask for one of the two"
        )
    found = SftDataset.write(run, file, min_reward=min_reward)
    print(f"{found.rows} conversations of {found.trials} trials at {len(found.tasks)} tasks: {file}")
    if found.left_out:
        print(f"left out: {found.reasons}")
    return 0


def tell(export: ModelExport, card: CardContent, *, asked: bool) -> None:
    """Say what was written; `asked`: the user chose between adapter and whole model."""
    base = card.base.hub_id or "a model that is not on the hub"
    if card.merged:
        print(f"step {card.step}, merged into {base}: {export.out}" if card.rank else f"step {card.step}: {export.out}")
        if card.rank and not asked:
            print("merged, since an adapter on a folder of this machine is of no use elsewhere; --adapter writes one")
        return
    print(f"step {card.step}, a LoRA of rank {card.rank} on {base}: {export.out}")
    if card.hindrances:
        print(f"warning: vLLM cannot serve this adapter ({'; '.join(card.hindrances)}); export with --merged")
