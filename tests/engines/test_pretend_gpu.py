"""The embedded engine on a GPU: this machine's where there is one, else a simulated one.

`pretend_gpu` says what the simulation covers. The tests that look for mistakes of a kind always use the simulation.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from logprob_check_rig import LogprobCheckRig
from model_kinds import small_model
from pretend_gpu import GpuTensor, gpu_or_simulation, pretend_gpu
from pretend_streams import RaceError
from sampler_setup import PROMPT, Reference, agrees, generate, random_prompt
from test_architectures import TRAINED, TRAINED_IF_NAMED
from test_learner import batch, make
from torch import nn

from harbortrainer.engines.attention.plan import Planner
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededManager
from harbortrainer.errors import UserError
from harbortrainer.warmup.supervised import load_policy

KINDS = ("qwen3", "gemma3", "mistral", "qwen3_moe")
"""One architecture per attention implementation, and one with experts."""
SAMPLED_BY_GENERATE = ("qwen3_5", "gpt_oss", "nemotron_h")
"""Linear attention, an attention of its own, and Mamba."""
MAX_SHARE_OFF = 0.0005
"""Share of the weights that may differ between CPU and GPU after one step."""
TOKENS = 12
"""Tokens per turn, more than the window of 8 tokens of models that have one."""
PROMPTS = [random_prompt(12, seed=1), random_prompt(40, seed=2)]


def test_mixing_devices_is_an_error():
    with pretend_gpu():
        on_cpu, on_gpu = torch.ones(2), torch.ones(2, device="cuda")
        for operation in (
            lambda: on_cpu + on_gpu,
            lambda: torch.cat([on_gpu, on_cpu]),
            lambda: on_gpu.add_(on_cpu),
            lambda: torch.where(on_cpu > 0, on_gpu, on_gpu),
            lambda: nn.Linear(2, 2)(on_gpu),
            lambda: nn.Linear(2, 2).cuda()(on_cpu),
        ):
            with pytest.raises(RuntimeError, match="tensors on cuda:0 and cpu"):
                operation()
        with pytest.raises(TypeError):
            on_gpu.numpy()


def test_results_stay_on_gpu():
    with pretend_gpu():
        on_gpu = torch.tensor([1.0, 2.0], device="cuda")
        layer = nn.Linear(2, 2).to("cuda")
        made_on_gpu = (
            on_gpu * 2,
            on_gpu[on_gpu > 1],
            torch.ones_like(on_gpu),
            layer(on_gpu),
            layer.weight,
            on_gpu.cpu().cuda(),
        )
        for made in made_on_gpu:
            assert isinstance(made, GpuTensor)
            assert made.device.type == "cuda"
        for made in (on_gpu.cpu(), on_gpu.to("cpu"), torch.ones(2), torch.zeros_like(on_gpu, device="cpu")):
            assert not isinstance(made, GpuTensor)
        on_cpu = torch.zeros(2)
        assert on_cpu.copy_(on_gpu) is on_cpu
        assert (on_gpu * 2).tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "use",
    [
        lambda on_gpu: on_gpu * 2,
        lambda on_gpu: on_gpu.zero_(),
        lambda on_gpu: on_gpu.tolist(),
        lambda on_gpu: on_gpu.cpu(),
    ],
)
def test_stream_must_wait_before_reading(use):
    with pretend_gpu():
        on_gpu, other = torch.ones(2, device="cuda") * 3, torch.cuda.Stream()
        with torch.cuda.stream(other), pytest.raises(RaceError):
            use(on_gpu)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            use(on_gpu)


@pytest.mark.parametrize("wait", [lambda x: x.cpu(), lambda x: x.sum().item()])
def test_cpu_synchronization_covers_every_stream(wait):
    with pretend_gpu():
        on_gpu = torch.ones(2, device="cuda") * 3
        wait(on_gpu)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (on_gpu + torch.ones(2).to("cuda")).tolist() == [4.0, 4.0]


def test_stream_must_wait_before_writing():
    with pretend_gpu():
        on_gpu, other = torch.ones(2, device="cuda") * 3, torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            assert (on_gpu + 1).shape == on_gpu[:1].expand(2).shape
        with pytest.raises(RaceError):
            on_gpu.zero_()
        torch.cuda.synchronize()
        on_gpu.zero_()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in KINDS else pytest.mark.long)
        for kind in [*TRAINED, *TRAINED_IF_NAMED, *SAMPLED_BY_GENERATE]
    ],
)
def test_sampled_logprobs_match_plain_forward_pass(tmp_path, kind):
    folder = small_model(tmp_path, kind)
    plain = Reference(folder)
    with gpu_or_simulation(), Sampler(folder, max_model_len=256, dtype="float32") as sampler:
        assert sampler.model.device.type == "cuda"
        first = generate(sampler.url, PROMPT, max_tokens=TOKENS, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        second = generate(sampler.url, turn, max_tokens=TOKENS, ignore_eos=True)
    assert agrees(first, plain)
    assert agrees(second, plain, turn)


def test_detects_plan_on_wrong_device(folder, monkeypatch):
    monkeypatch.setattr(Planner, "_tensor", lambda self, numbers: torch.tensor(numbers))
    with pretend_gpu(), pytest.raises(UserError, match="tensors on cuda:0 and cpu"):
        Sampler(folder, max_model_len=256).start()


def test_detects_batch_prepared_on_learner_stream(folder, monkeypatch):
    monkeypatch.setattr(SeededManager, "_on_compute_stream", lambda self: nullcontext())
    with pretend_gpu(), pytest.raises(UserError, match="another stream may still use"):
        Sampler(folder, max_model_len=256).start()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="lora", marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16"}, id="bf16", marks=pytest.mark.long),
        pytest.param({"lora": None}, id="full", marks=pytest.mark.long),
        pytest.param({"quantization": "nf4"}, id="nf4", marks=pytest.mark.long),
    ],
)
def test_steps_and_weight_updates_pass_logprob_check(folder, changes):
    rig = replace(LogprobCheckRig(folder, "float32", PROMPTS), **changes)
    with gpu_or_simulation():
        assert rig.stopped_at(3) is None, rig.message


@pytest.mark.parametrize("changes", [{}, {"lora": None}], ids=["lora", "full"])
def test_step_with_checkpointing_matches_cpu(folder, changes):
    on_cpu = make(folder, **changes)
    samples = batch(folder, on_cpu)
    expected = on_cpu.train(samples)
    with gpu_or_simulation():
        on_gpu = make(folder, device="cuda", dtype="float32", **changes)
        assert on_gpu.train(samples)["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-5)
        weights = {name: weight.cpu() for name, weight in on_gpu.weights().items()}
    off = sum(int(((weights[name] - weight).abs() > 1e-6).sum()) for name, weight in on_cpu.weights().items())
    # Adam's first update has the gradient's sign, also where the gradient is nothing but rounding.
    assert off <= MAX_SHARE_OFF * sum(weight.numel() for weight in weights.values()), off


def test_warmup_policy_is_on_gpu(folder):
    with gpu_or_simulation():
        model = load_policy(str(folder)).model
        assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_reports_gpu_too_small_for_a_request(tmp_path, kind):
    with pretend_gpu(memory=2**20), pytest.raises(UserError, match="not enough memory for"):
        Sampler(small_model(tmp_path, kind), max_model_len=256).start()
