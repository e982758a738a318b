"""Which engine runs, and why."""

import pytest

from harbortrainer.engines.engine_choice import Gpu, choose, find_gpus
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.errors import UserError

TWO = [Gpu("H100", 81559)] * 2


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "rl").write_text("")
    return Checkout(tmp_path)


def test_auto_takes_prime_rl_with_its_environment_and_two_gpus(checkout):
    choice = choose("auto", checkout, TWO)
    assert choice.engine == "prime-rl" and "2 GPUs" in choice.why


def test_auto_takes_the_embedded_engine_with_one_gpu(checkout):
    choice = choose("auto", checkout, TWO[:1])
    assert choice.engine == "local" and "there is 1" in choice.why


def test_auto_takes_the_embedded_engine_without_the_submodule(tmp_path):
    assert "is empty" in choose("auto", Checkout(tmp_path / "prime-rl"), TWO).why


def test_auto_takes_the_embedded_engine_without_prime_rls_environment(checkout):
    checkout.rl.unlink()
    assert "environment is not there" in choose("auto", checkout, TWO).why


def test_auto_takes_the_embedded_engine_for_a_warm_up(checkout):
    assert choose("auto", checkout, TWO, warmup=True).engine == "local"


def test_auto_takes_prime_rl_on_a_cluster_whose_gpus_are_elsewhere(checkout):
    assert choose("auto", checkout, [], cluster=True).engine == "prime-rl"


def test_what_is_asked_for_is_taken(checkout):
    assert choose("local", checkout, TWO).engine == "local"
    assert choose("prime-rl", checkout, []).engine == "prime-rl"


def test_an_engine_that_does_not_exist_is_told(checkout):
    with pytest.raises(UserError, match="auto, prime-rl, local"):
        choose("vllm", checkout, TWO)


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1", 2)])
def test_gpus_are_counted_as_cuda_would_see_them(tmp_path, monkeypatch, visible, count):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559'\necho 'NVIDIA H100, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.memory_mib for gpu in find_gpus()] == [81559] * count
