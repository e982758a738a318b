"""Injected faults of the sampler stop a run within three steps, in float32 and in bfloat16.

Sampler and learner are real, the model is random. `benchmarks/sabotage.py` injects the same faults into quickstarts.
"""

import pytest
from logprob_check_rig import LogprobCheckRig
from sabotages import SABOTAGES, sabotaged
from sampler_setup import random_prompt
from tiny_model import build_tiny_model

DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def rig_of(tmp_path_factory):
    model = build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=64, layers=2)
    prompts = [random_prompt(6 + i, seed=i) for i in range(12)]
    return lambda dtype: LogprobCheckRig(model, dtype, prompts, group=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SABOTAGES)
def test_faulty_sampler_stops_run_within_three_steps(rig_of, name, dtype):
    rig = rig_of(dtype)
    with sabotaged(name):
        assert rig.stopped_at(3) is not None, rig.max_metrics
    assert "ikely cause" in rig.message or "not kept" in rig.message


@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_sampler_does_not_stop_run(rig_of, dtype):
    rig = rig_of(dtype)
    assert rig.stopped_at(5) is None, rig.message
    assert rig.max_metrics["proof/spread"] < 2
    assert rig.crossed_update == 5 * 12, "requests ran during every weight update"
