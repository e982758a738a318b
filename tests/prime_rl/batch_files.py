"""What Prime-RL's orchestrator writes: batches for the trainer, msgpack of positional `MicroBatch`es, and episodes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack

# Positions of the fields of `prime_rl.transports.rollouts.types.MicroBatch`.
INPUT_IDS, LOSS_MASK, ADVANTAGES, LOGPROBS, POSITIONS = range(5)


@dataclass(frozen=True)
class Sequence:
    """One sample as the trainer reads it; the lists have equal lengths."""

    token_ids: list[int]
    mask: list[bool]
    advantages: list[float]
    logprobs: list[float]


def micro_batches(output_dir: Path, step: int) -> list[list]:
    """Return the micro batches of a step."""
    return msgpack.unpackb((output_dir / f"rollouts/step_{step}/rank_0.bin").read_bytes())


def sequences(output_dir: Path, step: int) -> Iterator[Sequence]:
    """Yield the samples of a step's batch; each packed sample starts where the position is 0."""
    for batch in micro_batches(output_dir, step):
        starts = [i for i, position in enumerate(batch[POSITIONS]) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(batch[POSITIONS])], strict=True):
            columns = (batch[column][start:end] for column in (INPUT_IDS, LOSS_MASK, ADVANTAGES, LOGPROBS))
            yield Sequence(*columns)


def last_batch(output_dir: Path) -> int:
    """Return the last step whose batch was written, 0 if there is none."""
    steps = [int(path.parent.name.removeprefix("step_")) for path in output_dir.glob("rollouts/step_*/rank_0.bin")]
    return max(steps, default=0)


def episodes(output_dir: Path, subset: str) -> Iterator[dict]:
    """Yield the recorded episodes of all steps: all (`all`), or only trained ones (`effective`)."""
    for path in sorted(output_dir.glob(f"rollouts/step_*/train/{subset}/traces.jsonl")):
        # Only "\n" ends a line: a model's text may have other separators, which `str.splitlines` splits at.
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        yield from map(json.loads, filter(None, whole.split(b"\n")))
