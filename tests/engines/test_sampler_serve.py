"""The sampler as a process: it serves, stops on request, and reports what it cannot use."""

import os
import signal
import subprocess
import sys

from sampler_setup import generate, http
from tiny_model import build_tiny_model

COMMAND = [sys.executable, "-c", "import sys; from harbortrainer.cli import main; sys.exit(main())", "serve"]


def test_serves_under_given_name_until_stopped(tmp_path):
    build_tiny_model(tmp_path / "policy")
    command = [*COMMAND, "policy", "--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http"))
        assert http.get(url + "/v1/models").json()["data"][0]["id"] == "policy"
        assert generate(url, [5, 6])["token_ids"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_folder_without_model_is_one_line_error(tmp_path):
    done = subprocess.run(
        [*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {tmp_path}: no config.json here")
