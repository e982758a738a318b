"""The `vllm` program: lookup, release, command line, versions, and checks of its replies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_stand_in import parse_options, write_stand_in

from harbortrainer.config.reader import load, read
from harbortrainer.engines.prime_rl.start import prepare_file
from harbortrainer.engines.vllm import vllm_process
from harbortrainer.engines.vllm.vllm_process import ServeSettings, VllmProgram, find_vllm, require_vllm, served_rank
from harbortrainer.engines.vllm.vllm_proxy import VersionRegistry, read_reply
from harbortrainer.errors import UserError

SETTINGS = ServeSettings(
    model="m",
    socket=Path("/tmp/s"),
    dtype="bfloat16",
    max_model_len=4096,
    memory_share=0.4,
    lora_rank=24,
    lora_layers=["o_proj", "q_proj"],
    seed=3,
)
RUN = """
output_dir = "{folder}/outputs"
run = {{ name = "r" }}
model = {{ name = "Qwen/Qwen3-0.6B" }}
[inference]  # ours and Prime-RL's
engine = "vllm"
[inference.vllm]
max_model_len = 512
gpu_memory_utilization = 0.4
[trainer.model.lora]
[orchestrator]
batch_size = 8
group_size = 4
renderer = {{ name = "qwen3" }}
[[orchestrator.train.source]]
env = {{ taskset = {{ id = "harbor_env", tasks_dir = "{tasks}" }} }}
"""
SAMPLES = Path(__file__).parents[2] / "datasets" / "harbor_tasks"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path, tasks=SAMPLES))
    return path


@pytest.fixture
def release(tmp_path, monkeypatch):
    """Put a `vllm` that prints this version on the PATH; None puts none."""

    def put(version: str | None) -> None:
        vllm_process._inspect.cache_clear()
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        if version is not None:
            write_stand_in(tmp_path / "bin")
            monkeypatch.setenv("STAND_IN_VERSION", version)

    return put


@pytest.mark.parametrize("release", [(0, 26), (0, 29), (0, 30), (1, 0)])
def test_vllm_accepts_command_line(release):
    version = f"{release[0]}.{release[1]}.0"
    path, command, *words = SETTINGS.command(VllmProgram("/usr/bin/vllm", version, release))
    assert (path, command) == ("/usr/bin/vllm", "serve")
    arguments = parse_options(words, version)
    assert arguments.enable_scale_out and arguments.lora_target_modules == ["o_proj", "q_proj"]
    assert (arguments.model, arguments.uds, arguments.dtype, arguments.seed) == ("m", "/tmp/s", "bfloat16", 3)
    assert (arguments.max_model_len, arguments.gpu_memory_utilization, arguments.max_lora_rank) == (4096, 0.4, 32)
    assert (
        arguments.enable_lora
        and arguments.logprobs_mode == "processed_logprobs"
        and arguments.generation_config == "vllm"
    )


@pytest.mark.parametrize(("rank", "served"), [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_rank_is_rounded_up_to_supported_one(rank, served):
    assert served_rank(rank) == served


def test_refuses_unsupported_rank():
    with pytest.raises(UserError, match="does not serve adapters of rank 513; set it to 512 or less"):
        served_rank(513)


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cu129", "0.31.0rc2.dev3+g1234", "1.0.0"])
def test_accepts_recent_release(release, version):
    release(version)
    program = require_vllm()
    assert program.version == version and program.release == tuple(map(int, version.split(".")[:2]))


def test_missing_old_or_silent_vllm_is_one_line_error(release):
    release(None)
    with pytest.raises(
        UserError, match=r"inference.engine: the program `vllm` was not found; install vLLM 0.26 or later"
    ):
        find_vllm()
    release("0.11.2")
    with pytest.raises(UserError, match=r"vLLM 0.11.2 is too old: .*; install vLLM 0.26 or later"):
        require_vllm()
    release("unknown")
    with pytest.raises(UserError, match=r"prints no version"):
        require_vllm()


@pytest.mark.parametrize(
    ("version", "message"), [(None, "the program `vllm` was not found"), ("0.11.2", "vLLM 0.11.2 is too old")]
)
def test_refuses_run_before_loading(release, run_file, tmp_path, version, message):
    release(version)
    code = (
        "import sys; from harbortrainer.cli import main\n"
        f"code = main(['train', '--engine', 'local', '--config', {str(run_file)!r}])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    expected = f"error: {run_file}: inference.engine: {message}"
    assert any(line.startswith(expected) for line in done.stderr.splitlines()), done.stderr
    assert not (tmp_path / "outputs").exists()


def test_key_is_ours_and_memory_share_is_prime_rls(run_file, tmp_path):
    config = load(run_file)
    assert config.inference.engine == "vllm" and config.inference.vllm_share == 0.4
    assert not any("inference" in note for note in config.notes)
    text = prepare_file(read(run_file), tmp_path / "r").read_text()
    assert "engine" not in text and "gpu_memory_utilization = 0.4" in text and "# ours and Prime-RL's" in text


def test_refuses_memory_share_for_embedded_sampler(run_file):
    config = load(run_file, ["--inference.engine", "embedded"])
    assert any("inference" in note for note in config.notes)
    with pytest.raises(UserError, match="'embedded', 'vllm'"):
        load(run_file, ["--inference.engine", "sglang"])


def test_version_is_held_while_requests_run():
    versions = VersionRegistry("base")
    with versions.request(0) as name:
        assert name == "base"
    assert versions.update_weights(1) == set() and versions.held == {0, 1}
    with versions.request(1) as name, pytest.raises(KeyError):
        assert name == "policy-1" and versions.running == 1
        assert versions.update_weights(2) == {0} and versions.update_weights(3) == set()
        assert versions.held == {1, 2, 3}
        versions.request(0).__enter__()
    assert versions.update_weights(4) == {1, 2} and versions.running == 0 and versions.current == 4


def reply(**changes) -> bytes:
    choice = {
        "index": 0,
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "token_id:5", "logprob": -0.5}, {"token_id": 6, "logprob": -1}]},
    }
    return json.dumps({"choices": [choice | changes], "prompt_logprobs": [None, {"7": {"logprob": -2.0}}]}).encode()


def test_reads_both_token_formats():
    (choice,) = read_reply(reply()).choices
    assert (choice.token_ids, choice.values) == ([5, 6], [-0.5, -1.0])
    assert read_reply(reply()).logprobs_of_prompt([3, 7], [1]) == [-2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [5, 7]}, "belong to other tokens"),
        ({"token_ids": [5]}, "belong to other tokens"),
        ({"token_ids": []}, "at least 1"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": None}, {"token_id": 6, "logprob": -1}]}}, "logprob"),
        (
            {"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -1}]}},
            "has no log",
        ),
    ],
)
def test_refuses_inconsistent_replies(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read_reply(reply(**changes))
    assert "\n" not in str(error.value)


def test_refuses_prompt_without_logprobs():
    with pytest.raises(ValueError, match="no log-probabilities of the prompt"):
        read_reply(reply()).logprobs_of_prompt([3, 7, 8], [1, 2])
    with pytest.raises(ValueError, match="a token of the prompt has no"):
        read_reply(reply()).logprobs_of_prompt([3, 8], [1])
