"""The sampler as a process: it serves, stops on request, and reports what it cannot use."""

import os
import signal
import subprocess
import sys

import pytest
from peft import get_peft_model
from sampler_setup import LORA, PROMPT, Reference, agrees, generate, http, random_adapter, set_adapter
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM

from harbortrainer.runs.checkpoints import write_file_list

COMMAND = [sys.executable, "-c", "import sys; from harbortrainer.cli import main; sys.exit(main())", "serve"]


@pytest.mark.long
def test_serves_run_under_given_name_until_stopped(tmp_path):
    base = build_tiny_model(tmp_path / "base", max_position_embeddings=512)
    checkpoint = tmp_path / "policy" / "checkpoints" / "step_1"
    model, adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LORA), random_adapter(base, seed=1)
    set_adapter(model, adapter)
    model.save_pretrained(str(checkpoint))
    (checkpoint / "progress.json").write_text('{"step": 1}')
    write_file_list(checkpoint)
    command = [*COMMAND, "policy", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        try:
            serving = next(line for line in process.stdout if line.startswith("serving"))
            assert "(context 512," in serving, "the model has fewer positions than the default"
            url = next(word for word in serving.split() if word.startswith("http"))
            assert http.get(url + "/v1/models").json()["data"][0]["id"] == "policy"
            assert agrees(generate(url, PROMPT), Reference(base, adapter))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_folder_without_model_is_one_line_error(tmp_path):
    done = subprocess.run(
        [*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {tmp_path}: no config.json here")
