"""A quantized base: the values of bitsandbytes, one copy for sampler and learner, and a working check."""

import subprocess
import sys

import pytest
import torch
from logprob_check_rig import LogprobCheckRig
from sabotages import sabotaged
from sampler_setup import random_prompt
from scripted_run import ScriptedRun
from test_shared_base import CPU, LORA, base_of, gpt2, learner_of, sample_batch, sample_of_length, size_of
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, Qwen3Config

from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import load, read
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.factories import load_learner, start_sampler
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.sampled_model import load_model as load_for_sampling
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.engines.memory_count import plan_memory, total_bytes
from harbortrainer.engines.models import share_weights
from harbortrainer.engines.quantized_base import QuantizedLinear, quantize
from harbortrainer.errors import UserError

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
SCHEMES = ["int8", "nf4"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GIB = 1024**3
QUANTIZED = '[model]\nquantization = "nf4"\n'


@pytest.fixture(params=SCHEMES)
def pair(folder, request):
    with Sampler(folder, model_name="policy", max_model_len=512, seed=3, quantization=request.param) as sampler:
        yield sampler, learner_of(folder, sampler.model)


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_match_bitsandbytes(folder, scheme, dtype):
    plain = dict(load_for_sampling(folder, device=CPU, dtype=dtype).named_modules())
    model = load_for_sampling(folder, device=CPU, dtype=dtype, quantization=scheme)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 7 * model.config.num_hidden_layers
    for name, layer in layers.items():
        weight = plain[name].weight.detach()
        if scheme == "nf4":
            theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=64, quant_type="nf4"))
            assert torch.equal(layer.dequantized(dtype), theirs)
        else:
            codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
            theirs = functional.int8_vectorwise_dequant(codes, largest)
            assert torch.allclose(layer.dequantized(dtype).float(), theirs, rtol=0.005)
        assert not any(p.requires_grad for p in layer.parameters())
    assert type(model.get_output_embeddings()) is nn.Linear
    assert model.dtype is dtype


@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_count_and_gradients_do_not_change_result(scheme):
    """bitsandbytes' own layers fail this, so that sampler and learner would be different policies."""
    torch.manual_seed(0)
    layer, x = QuantizedLinear(nn.Linear(64, 96), scheme, CPU), torch.randn(9, 64)
    with torch.no_grad():
        alone, together = torch.cat([layer(row[None]) for row in x]), layer(x)
    assert torch.allclose(alone, together, atol=1e-6)
    before = layer.weight.clone()
    inputs = x.clone().requires_grad_()
    out = layer(inputs)
    out.square().sum().backward()
    assert torch.equal(out, together)
    assert torch.equal(layer.weight, before)
    plain = x.clone().requires_grad_()
    (linear(plain, layer.dequantized(torch.float32)) + layer.bias).square().sum().backward()
    assert inputs.grad is not None and plain.grad is not None
    assert torch.equal(inputs.grad, plain.grad)


def test_bitsandbytes_own_layer_differs_between_modes():
    """Shows why bitsandbytes' layers are not used; if it fails, they may be usable."""
    import bitsandbytes

    if not functional.has_avx512bf16():
        pytest.skip("this CPU has no AVX-512 BF16")
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False, quant_type="nf4").to("cpu").eval()
    x = torch.randn(9, 64)
    training = layer(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        assert (layer(x) - training).abs().max() > 1e-3
    inputs = x.clone().requires_grad_()
    layer(inputs).sum().backward()
    assert inputs.grad is None


def test_base_tensors_are_in_memory_once(pair):
    sampler, learner = pair
    alone = size_of(sampler.model.parameters())
    update_weights(learner, sampler)
    ours, theirs = base_of(sampler.model), base_of(learner._policy.model)
    assert any(name.endswith(".scale") for name in ours)
    assert {name: w.data_ptr() for name, w in ours.items()} == {name: w.data_ptr() for name, w in theirs.items()}
    adapter = size_of(learner._policy.parameters)
    assert size_of([*sampler.model.parameters(), *learner._policy.model.parameters()]) == alone + 2 * adapter
    assert {p.dtype for p in learner._policy.parameters} == {torch.float32}


def test_training_leaves_base_unchanged_and_passes_check(pair):
    sampler, learner = pair
    before = {name: w.clone() for name, w in base_of(sampler.model).items()}
    for turn in range(4):
        update_weights(learner, sampler)
        metrics = learner.train(sample_batch(sampler, turn), sampler.rescore())
        assert metrics["proof/logprob_diff/max"] < 1e-4
        assert metrics["optim/grad_norm"] > 0
    assert any(w.any() for name, w in learner.weights().items() if "lora_B" in name)
    assert all(torch.equal(w, before[name]) for name, w in base_of(sampler.model).items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_match_dequantized_weights(folder, scheme):
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32, quantization=scheme)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            whole.get_parameter(f"{name}.weight").data.copy_(layer.dequantized(torch.float32))
    found = [gradients_of(base) for base in (share_weights(model), whole)]
    assert found[0] and all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


def gradients_of(base) -> list[torch.Tensor]:
    policy = LoraPolicy(base, LORA, device=CPU, seed=0)
    policy.set_weights({n: torch.full_like(w, 0.01) for n, w in policy.weights().items()})
    for batch in pack([sample_of_length(length) for length in (30, 9, 17)], 1000, CPU, packing=policy.packing):
        policy.logprobs(batch, training=True)[0].sum().backward()
    return [p.grad for p in policy.parameters if p.grad is not None]


@pytest.fixture(scope="module")
def rig_of(folder):
    prompts = [random_prompt(6 + i, seed=i) for i in range(12)]
    return lambda dtype, scheme: LogprobCheckRig(folder, dtype, prompts, group=6, quantization=scheme)


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "dtype"), [("nf4", "bfloat16"), ("int8", "bfloat16"), ("nf4", "float32")])
def test_logprob_check_passes_correct_run(rig_of, scheme, dtype):
    rig = rig_of(dtype, scheme)
    assert rig.stopped_at(5) is None, rig.message
    assert rig.max_metrics["proof/spread"] < 2


@pytest.mark.parametrize(
    "name",
    [
        *("shift of 0.05", "never updated"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("scaled by 1.05", "version -1")),
    ],
)
def test_logprob_check_stops_faulty_sampler(rig_of, name):
    rig = rig_of("bfloat16", "nf4")
    with sabotaged(name):
        assert rig.stopped_at(3) is not None, rig.max_metrics


@pytest.mark.parametrize("scheme", SCHEMES)
def test_run_keeps_quantized_base(tmp_path, folder, scheme):
    config = ScriptedRun(tmp_path).config
    config.model.quantization = scheme
    sampler = start_sampler(str(folder), config)
    try:
        learner = load_learner(str(folder), config, sampler)
        assert sampler.model is not None
        layers = quantized_layers(sampler.model), quantized_layers(learner._policy.model)
    finally:
        sampler.stop()
    assert [layer.scheme for side in layers for layer in side] == [scheme] * 28


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plan_matches_allocated_bytes(folder, scheme):
    plan = plan_memory(folder, LORA, device_type="cpu", capacity=GIB, quantization=scheme)
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32, quantization=scheme)
    # The largest layer, 64 x 128, dequantized to float32 on each side.
    assert plan.weights == total_bytes(model.parameters()) + 2 * 4 * 64 * 128
    whole = plan_memory(folder, LORA, device_type="cpu", capacity=GIB)
    assert (plan.trained, plan.cache_bytes.per_token) == (whole.trained, whole.cache_bytes.per_token)
    assert plan.saved_per_token == pytest.approx(whole.saved_per_token, rel=0.01)


@pytest.mark.long
def test_plan_fits_4_bit_8b_model_on_24_gb(tmp_path):
    """Expected by hand: 4.5 bits per weight; embeddings, output matrix and norms in bfloat16."""
    Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    plan = plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 24 * GIB), quantization="nf4")
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12_288
    rest = 2 * (36 * 8448 + 2 * 151_936 * 4096 + 4096)
    assert plan.weights == 36 * layer * 9 // 16 + rest + 2 * 2 * 4096 * 12_288
    assert plan.max_length > 16_384
    assert plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 24 * GIB)).max_length < 8192


def test_reports_model_without_quantizable_layers(tmp_path):
    convolutions = AutoModelForCausalLM.from_pretrained(gpt2(tmp_path))
    with pytest.raises(UserError, match=r"model.quantization: the model has no linear layer that can be quantized"):
        quantize(convolutions, "nf4", CPU)


def test_refuses_run_without_bitsandbytes_before_loading(run_file, tmp_path):
    file = run_file(QUANTIZED)
    code = (
        "import sys; from harbortrainer.engines import engine_choice; from harbortrainer.cli import main\n"
        "engine_choice.find_spec = lambda name: None if name == 'bitsandbytes' else object()\n"
        f"code = main(['train', '--engine', 'local', '--config', {str(file)!r}])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert last.startswith(f"error: {file}: model.quantization: not installed: bitsandbytes"), last
    assert "--extra quantized" in last
    assert not (tmp_path / "outputs").exists()


def test_key_is_for_embedded_engine_only(run_file):
    file = run_file(QUANTIZED)
    assert load(file).model.quantization == "nf4"
    with pytest.raises(UserError, match=r"model.quantization: needs the embedded engine; remove it"):
        prime_run(read(file))
    with pytest.raises(UserError, match="'int8', 'nf4'"):
        load(file, ["--model.quantization", "int4"])
    with pytest.raises(UserError, match="vLLM would sample from another base"):
        load(file, ["--inference.engine", "vllm"])
