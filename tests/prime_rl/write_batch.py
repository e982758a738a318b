"""Writes a batch with Prime-RL's own packing: `write_batch.py SAMPLES.json SEQ_LEN RANK_0.BIN`."""

import json
import sys
from pathlib import Path

import msgspec  # ty: ignore[import-not-found]
from prime_rl.trainer.batch import build_bin_cost, prepare_batch  # ty: ignore[import-not-found]
from prime_rl.transports.rollouts.types import TrainingSample  # ty: ignore[import-not-found]

samples, seq_len, file = sys.argv[1:]
rows = [TrainingSample(**row) for row in json.loads(Path(samples).read_text())]
(batch,) = prepare_batch(rows, int(seq_len), 1, build_bin_cost(None))
Path(file).parent.mkdir(parents=True)
Path(file).write_bytes(msgspec.msgpack.encode(batch))
