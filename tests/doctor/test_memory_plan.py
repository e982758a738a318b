"""The planned memory of the embedded engine equals the allocated tensors."""

import pytest
import torch
from sampler_setup import sample_for_training
from tiny_model import build_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.doctor import gpus
from harbortrainer.doctor.finding import Level
from harbortrainer.engines import memory_count
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.engines.fake_forward import PRIVATE_APIS, saved_tensors
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.trained_policy import recompute_activations
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededManager
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.engines.memory_count import plan_memory, saved_bytes, total_bytes
from harbortrainer.engines.peft_internals import adapter_weights
from harbortrainer.errors import UserError

GIB = 1024**3
LORA = LoraSettings(rank=4, alpha=8)
CONTEXT = 512
EIGHT_BILLION = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
)  # fmt: skip

FOUR_BILLION = Qwen3Config(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip


def cache_bytes(sampler: Sampler) -> int:
    """Return the allocated size of the paged cache."""
    assert sampler._handler is not None
    manager = sampler._handler.engine._manager
    assert isinstance(manager, SeededManager)
    processor = manager.batch_processor
    assert processor is not None
    return processor.cache.cache_tensor.nbytes


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_planned_weights_and_adapter_equal_allocated(folder, kind, dtype):
    plan = plan_memory(folder, LORA, device_type=kind, capacity=20 * GIB)
    with Sampler(folder, max_model_len=CONTEXT, dtype=dtype) as sampler:
        assert total_bytes(sampler.model.parameters()) == plan.weights
        learner = Learner(folder, LORA, OptimSettings(), DefaultLoss(), base=sampler.model)
        update_weights(learner, sampler)
        learner.train([sample_for_training(sampler)])
        update_weights(learner, sampler)
        adam_moments = [
            value for state in learner._optimizer.state.values() for name, value in state.items() if name != "step"
        ]
        optimized, adapter = learner._policy.parameters, learner._policy.weights().values()
        masters = learner._policy.master_weights().values()
        sampled = [w for name in ("policy", "policy1") for w in adapter_weights(sampler.model, name).values()]
        assert {w.dtype for w in (*adapter, *sampled)} == {sampler.model.dtype}
        # `optimized` counts once as weights and once as their gradients.
        assert total_bytes([*adapter, *masters, *optimized, *adam_moments, *sampled]) == plan.trained


def test_planned_cache_equals_allocated(folder):
    plan = plan_memory(folder, LORA, device_type="cpu", capacity=20 * GIB)
    with Sampler(folder, max_model_len=CONTEXT) as sampler:
        tokens = sampler.stats()["cache_tokens"]
        cached = plan.cache(CONTEXT, CONTEXT)
        assert cached <= tokens <= cached + 2 * 16
        assert plan.cache_bytes.per_token * tokens == pytest.approx(cache_bytes(sampler), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens", [100, 333])
def test_saved_activations_equal_the_count(folder, checkpointing, tokens):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0, checkpointing=checkpointing)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    saved = saved_bytes(saved_tensors(lambda: base.get_decoder()(input_ids=ids, use_cache=False), base.parameters()))
    empty, _ = memory_count.build_without_weights(folder, LORA, torch.float32)
    if checkpointing:
        memory_count.recompute_activations(empty)
    assert saved == pytest.approx(tokens * memory_count.count_saved(empty).per_token, rel=0.005)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PATTERN = ["sliding_attention", "full_attention"] * 3
LAYERED = {
    "qwen3": {},
    "gemma3_text": {"layer_types": PATTERN, "sliding_window": 32},
    "qwen3_next": {
        "layer_types": [*["linear_attention"] * 5, "full_attention"], "mlp_only_layers": [*range(6)],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", LAYERED)
def test_few_layers_give_the_count_of_all(monkeypatch, model_type, checkpointing):
    """Of equal layers two are counted; layers that differ are counted all."""
    config = AutoConfig.for_model(model_type, vocab_size=256, num_hidden_layers=6, **SMALL, **LAYERED[model_type])
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config).eval()
    if checkpointing:
        recompute_activations(base)
    counted = memory_count.count_saved(base).per_token
    assert len(base.get_decoder().layers) == 6, "the model is as before"
    monkeypatch.setattr(memory_count, "_COUNTED_LAYERS", 7)
    assert counted == memory_count.count_saved(base).per_token > 0


def test_logits_of_a_chunk_are_counted(folder):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0)
    length, plan = 300, plan_memory(folder, LORA, device_type="cpu", capacity=GIB)
    sample = Sample([5] * length, [t > 0 for t in range(length)], [0.0] * length, [0] * length, 1.0, 1.0)
    (batch,) = pack([sample], 1000, torch.device("cpu"))
    saved = saved_bytes(saved_tensors(lambda: policy.logprobs(batch, training=True), base.parameters()))
    assert length * plan.saved_per_token < saved < plan.learner(length)


def test_shared_prefixes_stay_within_the_plan(folder):
    """Keys and values of a shared prefix are copied; a copied token needs an eighth of a computed token's memory."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy, plan = (
        LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0),
        plan_memory(folder, LORA, device_type="cpu", capacity=GIB),
    )
    samples = [
        Sample([5] * 200 + [n] * 4, [t == 203 for t in range(204)], [0.0] * 204, [0] * 204, 1.0, 1.0) for n in range(60)
    ]
    (batch, *_) = pack(samples, 1000, torch.device("cpu"))
    assert batch.input_ids.shape[1] < 300
    saved = saved_bytes(saved_tensors(lambda: policy.logprobs(batch, training=True), base.parameters()))
    assert saved < plan.learner(1000)


@pytest.mark.long
def test_8b_model_fits_48_gb_with_32_768_tokens(tmp_path):
    """Numbers by hand: two bytes each; a layer's norms have 2 x 4096 + 2 x 128 weights, the final norm 4096."""
    EIGHT_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 48 * GIB))
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12_288 + 8448
    assert plan.weights == 2 * (36 * layer + 2 * 151_936 * 4096 + 4096) == 16_381_470_720
    # Rank 16 for each matrix: 16 x (columns + rows). Three copies have two bytes, four are float32.
    lora = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    assert plan.trained == (3 * 2 + 4 * 4) * 36 * lora == 960_233_472
    assert plan.cache_bytes.per_token == 2 * 36 * 8 * 128 * 2
    # The input of each block, and the float32 values that the final norm saves.
    assert plan.saved_per_token == 36 * 4096 * 2 + 4 * 4096 + 4
    assert plan.learner(32_768) == 32_768 * (311_300 + plan.recomputed_per_token) + 6 * 4 * 2**24
    # 4096 tokens with a float32 norm; logits of 256 requests.
    layer = 4096 * (2 * (2 * 4096 + 2 * 128 + 4 + 3 * 12_288) + 2 * 4 * 4096)
    logits, drawn = 256 * 151_936 * (2 + 4), 2**22 * 64
    fixed = layer + logits + drawn
    assert plan.forward.total(32_768, 1000) == fixed + 32_768 * 4096 * 2 + 1000 * 2 * 4096
    free = plan.capacity - plan.weights
    assert plan.cache(8192, 8192) == int(0.4 * free) // 147_456
    remaining = free - plan.trained - plan.learner(32_768) - plan.forward.total(32_768, 0)
    assert int(0.4 * free) > remaining > 32_768 * (147_456 + 8192)
    assert plan.cache(32_768, 32_768) == remaining // (147_456 + 8192)
    assert plan.capacity - 147_456 - 8192 < sum(plan.breakdown(32_768, 32_768).values()) <= plan.capacity
    assert plan.memory_error(32_768, 32_768) is None
    assert plan.max_length == 40_960
    assert not plan.fits(plan.max_length + 256, plan.max_length + 256)
    assert plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=16 * GIB).max_length == 0


def test_4b_model_on_24_gb_proposes_the_context_that_fits(tmp_path):
    FOUR_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 24 * GIB))
    layer = 2560 * 2 * (4096 + 1024) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert plan.weights == 2 * (36 * layer + 151_936 * 2560 + 2560) == 8_044_936_192
    assert plan.saved_per_token == 36 * 2560 * 2 + 4 * 2560 + 4
    assert plan.memory_error(16_384, 16_384) is None
    error = plan.memory_error(32_768, 32_768)
    assert error is not None
    assert (error.where, error.do) == ("seq_len", "set it to 25344 or less")
    assert plan.memory_error(25_344, 25_344) is None


def test_micro_batch_shrinks_before_a_run_is_refused(tmp_path):
    EIGHT_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 24 * GIB))
    assert [plan.micro_batch(length, length) for length in (2048, 4096, 7168)] == [4096, 4096, 7168]
    assert plan.cache(2048, 2048) >= 2048
    assert sum(plan.breakdown(2048, 2048).values()) <= plan.capacity
    larger = plan_memory(tmp_path, LoraSettings(), device_type="cuda", capacity=int(0.9 * 48 * GIB))
    assert larger.micro_batch(2048, 2048) == 16_384


def test_small_model_fits_its_full_context(tmp_path):
    short = build_tiny_model(tmp_path, max_position_embeddings=100)
    assert plan_memory(short, LORA, device_type="cpu", capacity=20 * GIB).max_length == 100


def test_doctor_prints_and_checks_the_memory_plan(plan, tmp_path):
    EIGHT_BILLION.save_pretrained(tmp_path)
    model = {"name": str(tmp_path)}
    (fits,) = gpus.check(plan(gpus=[Gpu("A", 49_152)], model=model, seq_len=4096))
    assert fits.level is Level.GREEN
    assert "trials of 4096 tokens at once" in fits.what
    (long,) = gpus.check(plan(gpus=[Gpu("A", 47_104)], model=model, seq_len=40_960))
    assert long.level is Level.RED
    assert long.where == "run.toml: seq_len"
    shorter = int(long.do.split()[3])
    assert [f.level for f in gpus.check(plan(gpus=[Gpu("A", 47_104)], model=model, seq_len=shorter))] == [Level.GREEN]
    (large,) = gpus.check(plan(gpus=[Gpu("A", 16_384)], model=model, seq_len=4096))
    assert large.level is Level.RED
    assert large.where == "run.toml: model.name"


def test_model_of_a_warm_up_is_planned_too(plan, tmp_path):
    EIGHT_BILLION.save_pretrained(tmp_path)
    warmup = {"model": str(tmp_path)}
    (fits,) = gpus.check(plan(gpus=[Gpu("A", 49_152)], warmup=warmup, seq_len=4096))
    assert fits.level is Level.GREEN
    (large,) = gpus.check(plan(gpus=[Gpu("A", 16_384)], warmup=warmup, seq_len=4096))
    assert (large.level, large.where) == (Level.RED, "run.toml: warmup.model")


def test_unknown_target_modules_name_the_key(plan, folder, monkeypatch):
    monkeypatch.setattr(gpus, "SMALL", 0.0)
    lora = {"model": {"lora": {"target_modules": ["nothing"]}}}
    (finding,) = gpus.check(plan(model={"name": str(folder)}, trainer=lora))
    assert finding.level is Level.RED
    assert finding.where == "run.toml: trainer.model.lora.target_modules"


def test_unreadable_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    with pytest.raises(UserError, match="config cannot be read"):
        plan_memory(tmp_path, LORA, device_type="cpu", capacity=GIB)


def test_model_that_needs_weights_is_estimated_by_size(plan, tmp_path, monkeypatch):
    folder = tmp_path / "Mine-0.1B"
    Qwen3MoeConfig(num_hidden_layers=1, hidden_size=64).save_pretrained(folder)

    def cannot(*_, **__):
        raise RuntimeError("depends on its content")

    monkeypatch.setattr(gpus, "SMALL", 0.0)
    monkeypatch.setattr(memory_count, "plan_memory", cannot)
    (finding,) = gpus.check(plan(model={"name": str(folder)}))
    assert "needs about" in finding.what


def test_private_torch_apis_are_unchanged():
    PRIVATE_APIS.check()
