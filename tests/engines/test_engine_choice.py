"""The choice of the engine, and its reason."""

import pytest

from harbortrainer.engines.engine_choice import Gpu, choose, find_gpus
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.errors import UserError

pytestmark = pytest.mark.process  # nvidia-smi
TWO_GPUS = [Gpu("H100", 81559)] * 2


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "rl").write_text("")
    return Checkout(tmp_path)


def test_auto_chooses_prime_rl_with_environment_and_two_gpus(checkout):
    choice = choose("auto", checkout, TWO_GPUS)
    assert choice.engine == "prime-rl" and "2 GPUs" in choice.reason


def test_auto_chooses_embedded_engine_with_one_gpu(checkout):
    choice = choose("auto", checkout, TWO_GPUS[:1])
    assert choice.engine == "local" and "this machine has 1" in choice.reason


def test_auto_chooses_embedded_engine_without_submodule(tmp_path):
    assert "is empty" in choose("auto", Checkout(tmp_path / "prime-rl"), TWO_GPUS).reason


def test_auto_chooses_embedded_engine_without_prime_rl_environment(checkout):
    checkout.rl.unlink()
    assert "environment is not installed" in choose("auto", checkout, TWO_GPUS).reason


def test_auto_chooses_embedded_engine_for_warmup(checkout):
    assert choose("auto", checkout, TWO_GPUS, warmup=True).engine == "local"


def test_auto_chooses_prime_rl_on_cluster(checkout):
    assert choose("auto", checkout, [], cluster=True).engine == "prime-rl"


def test_uses_requested_engine(checkout):
    assert choose("local", checkout, TWO_GPUS).engine == "local"
    assert choose("prime-rl", checkout, []).engine == "prime-rl"


def test_refuses_unknown_engine(checkout):
    with pytest.raises(UserError, match="auto, prime-rl, local"):
        choose("vllm", checkout, TWO_GPUS)


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1", 2)])
def test_counts_gpus_visible_to_cuda(tmp_path, monkeypatch, visible, count):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559'\necho 'NVIDIA H100, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.memory_mib for gpu in find_gpus()] == [81559] * count
