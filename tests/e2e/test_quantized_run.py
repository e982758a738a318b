"""A run on a quantized base: real trials, sampled, trained and proven on it; and its checkpoint played on it again."""

import json

import mini_run
import pytest
from test_vllm_engine import play, steps

from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.policy_files import PolicyFiles

pytestmark = [pytest.mark.e2e, pytest.mark.long]
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def test_a_run_trains_on_a_quantized_base_and_a_resume_goes_on(tmp_path):
    config = mini_run.write_run(tmp_path, steps=2, evaluates=False)
    config.write_text(config.read_text().replace("lr = 1e-3", "lr = 1e-2"))
    first = play(config, "--model.quantization", "nf4")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "kernels" not in first.stderr
    again = play(config, "--model.quantization", "nf4", "--resume", "--max-steps", "3")
    assert again.returncode == 0, again.stdout + again.stderr
    run = tmp_path / "outputs" / "mini"
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["tokens/trained"] > 0 and row["proof/logprob_diff/max"] < 1e-4 for row in rows)
    plain = play(config, "--resume", "--max-steps", "4")
    assert plain.returncode == 2
    assert "model.quantization" in plain.stderr
    found = PolicyFiles.find(str(run))
    assert (found.base, found.quantization) == (str(tmp_path / "model"), "nf4")
    assert LocalModel(found).identity()["base"] == "nf4"
    moved = tmp_path / "adapter"
    assert found.adapter is not None
    found.adapter.rename(moved)
    assert PolicyFiles.find(str(moved)).quantization is None
    assert json.loads((moved / "adapter_config.json").read_text())["base_model_name_or_path"] == found.base
