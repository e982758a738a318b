"""The embedded engine on a GPU, as far as a machine without one can tell (`pretend_gpu` says how far that is)."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from model_kinds import small_model
from pretend_gpu import OnCard, pretend_gpu
from pretend_streams import RaceError
from proof_rig import ProofRig
from sampler_setup import PROMPT, Reference, agrees, generate, random_prompt
from test_architectures import TRAINED, TRAINED_IF_NAMED
from test_learner import batch, make
from tiny_model import build_tiny_model
from torch import nn

from harbortrainer.engines import decode_graphs
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededManager
from harbortrainer.engines.ragged_plan import Planner
from harbortrainer.errors import UserError
from harbortrainer.warmup.starting_policy import load_policy

KINDS = ("qwen3", "gemma3", "mistral", "qwen3_moe")
"""One for each way to attend, and one with experts."""
PROMPTS = [random_prompt(12, seed=1), random_prompt(40, seed=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def test_tensors_of_two_devices_do_not_meet():
    with pretend_gpu():
        here, there = torch.ones(2), torch.ones(2, device="cuda")
        for meeting in (
            lambda: here + there,
            lambda: torch.cat([there, here]),
            lambda: there.add_(here),
            lambda: torch.where(here > 0, there, there),
            lambda: nn.Linear(2, 2)(there),
            lambda: nn.Linear(2, 2).cuda()(here),
        ):
            with pytest.raises(RuntimeError, match="tensors on cuda:0 and cpu"):
                meeting()
        with pytest.raises(TypeError):
            there.numpy()


def test_what_is_made_on_the_gpu_or_of_what_is_there_is_there():
    with pretend_gpu():
        there = torch.tensor([1.0, 2.0], device="cuda")
        layer = nn.Linear(2, 2).to("cuda")
        made_there = there * 2, there[there > 1], torch.ones_like(there), layer(there), layer.weight, there.cpu().cuda()
        for made in made_there:
            assert isinstance(made, OnCard)
            assert made.device.type == "cuda"
        for made in (there.cpu(), there.to("cpu"), torch.ones(2), torch.zeros_like(there, device="cpu")):
            assert not isinstance(made, OnCard)
        here = torch.zeros(2)
        assert here.copy_(there) is here
        assert (there * 2).tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "use",
    [lambda there: there * 2, lambda there: there.zero_(), lambda there: there.tolist(), lambda there: there.cpu()],
)
def test_what_one_stream_wrote_another_uses_once_it_has_waited(use):
    with pretend_gpu():
        there, other = torch.ones(2, device="cuda") * 3, torch.cuda.Stream()
        with torch.cuda.stream(other), pytest.raises(RaceError):
            use(there)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            use(there)


@pytest.mark.parametrize("wait", [lambda there: there.cpu(), lambda there: there.sum().item()])
def test_what_the_cpu_was_told_of_is_over_for_every_stream(wait):
    with pretend_gpu():
        there = torch.ones(2, device="cuda") * 3
        wait(there)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (there + torch.ones(2).to("cuda")).tolist() == [4.0, 4.0]


def test_what_one_stream_reads_another_writes_once_that_is_over():
    with pretend_gpu():
        there, other = torch.ones(2, device="cuda") * 3, torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            assert (there + 1).shape == there[:1].expand(2).shape
        with pytest.raises(RaceError):
            there.zero_()
        torch.cuda.synchronize()
        there.zero_()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in KINDS else pytest.mark.long) for kind in TRAINED + TRAINED_IF_NAMED]
)
def test_what_is_sampled_is_what_a_plain_forward_pass_says(tmp_path, kind):
    folder = small_model(tmp_path, kind)
    plain = Reference(folder)
    with pretend_gpu(), Sampler(folder, max_model_len=256, dtype="float32") as sampler:
        assert sampler.model.device.type == "cuda"
        first = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        second = generate(sampler.url, turn, max_tokens=20, ignore_eos=True)
    assert agrees(first, plain)
    assert agrees(second, plain, turn)


def test_a_plan_on_the_wrong_device_is_found(folder, monkeypatch):
    monkeypatch.setattr(decode_graphs, "COUNTS", ())
    monkeypatch.setattr(Planner, "_numbers", lambda self, numbers: torch.tensor(numbers))
    with pretend_gpu(), pytest.raises(UserError, match="tensors on cuda:0 and cpu"):
        Sampler(folder, max_model_len=256).start()


def test_a_batch_that_is_prepared_on_the_learners_stream_is_found(folder, monkeypatch):
    monkeypatch.setattr(SeededManager, "_on_its_stream", lambda self: nullcontext())
    with pretend_gpu(), pytest.raises(UserError, match="another stream may not be done"):
        Sampler(folder, max_model_len=256).start()


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16"}, {"lora": None}, {"quantization": "nf4"}], ids=["lora", "bf16", "full", "nf4"]
)
def test_steps_with_their_hand_overs_pass_the_proof(folder, changes):
    rig = replace(ProofRig(folder, "float32", PROMPTS), **changes)
    with pretend_gpu():
        assert rig.stopped_at(3) is None, rig.message


@pytest.mark.parametrize("changes", [{}, {"lora": None}], ids=["lora", "full"])
def test_a_step_is_the_cpus_with_activations_computed_again(folder, changes):
    on_cpu = make(folder, **changes)
    samples = batch(folder, on_cpu)
    told = on_cpu.train(samples)
    with pretend_gpu():
        on_gpu = make(folder, device="cuda", dtype="float32", **changes)
        assert on_gpu.train(samples)["optim/grad_norm"] == pytest.approx(told["optim/grad_norm"], rel=1e-5)
        weights = {name: weight.cpu() for name, weight in on_gpu.weights().items()}
    for name, weight in on_cpu.weights().items():
        assert torch.allclose(weights[name], weight, atol=1e-6)


def test_the_policy_that_warmup_makes_is_on_the_gpu(folder):
    with pretend_gpu():
        model = load_policy(str(folder)).model
        assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_without_room_for_a_request_is_told(tmp_path, kind):
    with pretend_gpu(memory=2**20), pytest.raises(UserError, match="no memory for"):
        Sampler(small_model(tmp_path, kind), max_model_len=256).start()
