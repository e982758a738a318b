"""Prime-RL's trainer on a CPU, with FSDP's forward pass in float32 in place of bfloat16, to compare numbers with it."""

import sys

import cpu_programs
import torch
import torch.distributed.fsdp

policy = torch.distributed.fsdp.MixedPrecisionPolicy
torch.distributed.fsdp.MixedPrecisionPolicy = lambda **_: policy(  # ty: ignore[invalid-assignment]
    param_dtype=torch.float32, reduce_dtype=torch.float32
)
cpu_programs.main("trainer", sys.argv[1:])
