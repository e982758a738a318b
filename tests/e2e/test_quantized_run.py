"""A run with real trials and a quantized base: training, log-probability check, resume and the checkpoint's base."""

import json

import mini_run
import pytest
from test_vllm_engine import play, steps

from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.policy_files import PolicyFiles

pytestmark = [pytest.mark.e2e, pytest.mark.long]
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def test_quantized_run_trains_resumes_and_records_quantization(tmp_path):
    config = mini_run.write_run(tmp_path, steps=2, evaluates=False)
    config.write_text(config.read_text().replace("lr = 1e-3", "lr = 1e-2"))
    first = play(config, "--model.quantization", "nf4")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "kernels" not in first.stderr
    resumed = play(config, "--model.quantization", "nf4", "--resume", "--max-steps", "3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run = tmp_path / "outputs" / "mini"
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["tokens/trained"] > 0 and row["proof/logprob_diff/max"] < 1e-4 for row in rows)
    unquantized = play(config, "--resume", "--max-steps", "4")
    assert unquantized.returncode == 2
    assert "model.quantization" in unquantized.stderr
    policy = PolicyFiles.find(str(run))
    assert (policy.base, policy.quantization) == (str(tmp_path / "model"), "nf4")
    assert LocalModel(policy).identity()["base"] == "nf4"
    moved_adapter = tmp_path / "adapter"
    assert policy.adapter is not None
    policy.adapter.rename(moved_adapter)
    assert PolicyFiles.find(str(moved_adapter)).quantization is None
    assert json.loads((moved_adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == policy.base
