"""A CPU replacement for Prime-RL's trainer, which needs CUDA: reads batches from disk, publishes adapters to disk.

The files have Prime-RL's formats: msgpack of positional `MicroBatch`es under rollouts/step_N, a peft folder and the
marker STABLE under broadcasts/step_N, a sharded checkpoint under checkpoints/step_N/trainer. As a program it takes the
arguments of Prime-RL's `torchrun`.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

# Positions of the fields of `prime_rl.transports.rollouts.types.MicroBatch`.
INPUT_IDS, LOSS_MASK, ADVANTAGES, LOGPROBS, POSITIONS = range(5)


@dataclass(frozen=True)
class Sequence:
    """One sample as the trainer reads it; the lists have equal lengths."""

    token_ids: list[int]
    mask: list[bool]
    advantages: list[float]
    logprobs: list[float]


def decode(path: Path) -> Iterator[Sequence]:
    """Yield the samples of one batch file; each packed sample starts where the position is 0."""
    for batch in msgpack.unpackb(path.read_bytes()):
        starts = [i for i, position in enumerate(batch[POSITIONS]) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(batch[POSITIONS])], strict=True):
            columns = (batch[column][start:end] for column in (INPUT_IDS, LOSS_MASK, ADVANTAGES, LOGPROBS))
            yield Sequence(*columns)


class StandInTrainer(threading.Thread):
    """Publishes its starting version, then one more adapter for each batch that it reads.

    Args:
        model: Folder of the base model.
        output_dir: Folder of the run.
        steps: Number of the last step.
        start: Number of the step that it continues from.
        checkpoints: Whether it writes its part of a checkpoint after each step.
    """

    def __init__(self, model: Path, output_dir: Path, steps: int, *, start: int = 0, checkpoints: bool = False) -> None:
        super().__init__(daemon=True)
        base = AutoModelForCausalLM.from_pretrained(model)
        targets = ["q_proj", "v_proj"]
        self.model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        self.output_dir, self.steps, self.start_at = output_dir, steps, start
        self.checkpoints = checkpoints
        self.batches: list[list[Sequence]] = []
        self.publish(start)

    def publish(self, version: int) -> None:
        """Write one policy version: the adapter's files first, the marker last."""
        folder = self.output_dir / "broadcasts" / f"step_{version}"
        generator = torch.Generator().manual_seed(version)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                weight.data = torch.randn(weight.shape, generator=generator) * 0.2 * bool(version)
        self.model.save_pretrained(str(folder))
        (folder / "STABLE").touch()

    def run(self) -> None:
        """Read one batch and publish one version a step."""
        for step in range(self.start_at + 1, self.steps + 1):
            path = self.output_dir / "rollouts" / f"step_{step}" / "rank_0.bin"
            while not path.exists():
                time.sleep(0.1)
            self.batches.append(list(decode(path)))
            self.publish(step)
            if self.checkpoints:
                folder = self.output_dir / "checkpoints" / f"step_{step}" / "trainer"
                dcp.save({"step": torch.tensor(step)}, checkpoint_id=folder, no_dist=True)


def main(config_file: Path) -> None:
    """Run the trainer from a config file. It resumes from the named step, else from the newest, complete or not.

    Raises:
        FileNotFoundError: The checkpoint to resume from is not complete.
    """
    config = json.loads(config_file.read_text())
    output_dir, start = Path(config["output_dir"]), 0
    if (resume := config["resume"]) is not None:
        saved = [int(path.name.removeprefix("step_")) for path in output_dir.glob("checkpoints/step_*")]
        start = resume["step"] or max(saved, default=0)
    if start:
        (output_dir / "checkpoints" / f"step_{start}" / "trainer" / ".metadata").stat()
    checkpoints = config["ckpt"] is not None
    StandInTrainer(
        Path(config["model"]["name"]), output_dir, config["max_steps"], start=start, checkpoints=checkpoints
    ).run()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
