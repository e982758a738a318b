"""Writes batches with Prime-RL's own packing: `write_batch.py SEQ_LEN RUN SAMPLES_1.json SAMPLES_2.json ...`."""

import json
import sys
from pathlib import Path

import msgspec  # ty: ignore[import-not-found]
from prime_rl.trainer.batch import build_bin_cost, prepare_batch  # ty: ignore[import-not-found]
from prime_rl.transports.rollouts.types import TrainingSample  # ty: ignore[import-not-found]

seq_len, run, *files = sys.argv[1:]
for step, samples in enumerate(files, start=1):
    rows = [TrainingSample(**row) for row in json.loads(Path(samples).read_text())]
    (batch,) = prepare_batch(rows, int(seq_len), 1, build_bin_cost(None))
    file = Path(run) / f"rollouts/step_{step}/rank_0.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.msgpack.encode(batch))
