"""The plan of the embedded engine's memory, against tensors that are really there."""

import pytest
import torch
from sampler_setup import sampled_sample
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from harbortrainer.config.trainer_table import LoraSettings, LossSettings, OptimSettings
from harbortrainer.doctor import gpus
from harbortrainer.doctor.finding import Level
from harbortrainer.engines import memory_count
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.parts import hand_over
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import bytes_of, kept_by, plan_memory
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def cache_bytes(sampler: Sampler) -> int:
    """What the paged cache took."""
    assert sampler._replies is not None
    processor = sampler._replies.engine._manager.batch_processor
    assert processor is not None
    return processor.cache.cache_tensor.nbytes


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_weights_and_adapter_are_those_that_are_really_there(folder, kind, dtype):
    plan = plan_memory(folder, LORA, kind=kind, room=20 * GIB)
    with Sampler(folder, max_model_len=CONTEXT, dtype=dtype) as sampler:
        assert bytes_of(sampler.model.parameters()) == plan.weights
        learner = Learner(folder, LORA, OptimSettings(), LossSettings(), base=sampler.model)
        hand_over(learner, sampler)
        learner.train([sampled_sample(sampler)])
        hand_over(learner, sampler)
        moments = [
            value for state in learner._optimizer.state.values() for name, value in state.items() if name != "step"
        ]
        stepped, own = learner._policy.parameters, learner._policy.weights().values()
        masters = learner._policy.masters().values()
        sampled = [w for name in ("policy", "policy1") for w in adapter_weights(sampler.model, name).values()]
        assert {w.dtype for w in (*own, *sampled)} == {sampler.model.dtype}
        # What is stepped has a gradient.
        assert bytes_of([*own, *masters, *stepped, *moments, *sampled]) == plan.trained


def test_the_cache_is_the_one_that_is_really_there(folder):
    plan = plan_memory(folder, LORA, kind="cpu", room=20 * GIB)
    with Sampler(folder, max_model_len=CONTEXT) as sampler:
        tokens = sampler.stats()["cache_tokens"]
        cached = plan.cache(CONTEXT, CONTEXT)
        assert cached <= tokens <= cached + 2 * 16
        assert plan.cached_token * tokens == pytest.approx(cache_bytes(sampler), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens", [100, 333])
def test_what_a_pass_keeps_is_what_was_counted_without_running_it(folder, checkpointing, tokens):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0, checkpointing=checkpointing)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    kept = kept_by(lambda: base.get_decoder()(input_ids=ids, use_cache=False), base.parameters())
    empty, _ = memory_count.without_content(folder, LORA, torch.float32)
    if checkpointing:
        memory_count.recompute_activations(empty)
    assert kept == pytest.approx(tokens * memory_count.kept_per_token(empty), rel=0.005)


def test_the_logits_of_a_chunk_are_counted(folder):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0)
    length, plan = 300, plan_memory(folder, LORA, kind="cpu", room=GIB)
    sample = Sample([5] * length, [t > 0 for t in range(length)], [0.0] * length, [0] * length, 1.0, 1.0)
    (batch,) = pack([sample], 1000, torch.device("cpu"))
    kept = kept_by(lambda: policy.logprobs(batch, training=True), base.parameters())
    assert length * plan.kept_token < kept < plan.learner(length)


def test_what_samples_share_takes_no_more_than_was_counted(folder):
    """Keys and values of a common beginning are copied, a token of them for an eighth of one that is computed."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy, plan = (
        LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0),
        plan_memory(folder, LORA, kind="cpu", room=GIB),
    )
    samples = [
        Sample([5] * 200 + [n] * 4, [t == 203 for t in range(204)], [0.0] * 204, [0] * 204, 1.0, 1.0) for n in range(60)
    ]
    (batch, *_) = pack(samples, 1000, torch.device("cpu"))
    assert batch.input_ids.shape[1] < 300
    kept = kept_by(lambda: policy.logprobs(batch, training=True), base.parameters())
    assert kept < plan.learner(1000)


def test_an_8b_model_trains_on_32_768_tokens_on_48_gb_and_the_cache_takes_what_is_left(tmp_path):
    """By hand, with two bytes a number; a layer's norms have 2 x 4096 + 2 x 128 weights, the last one 4096."""
    EIGHT_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), kind="cuda", room=int(0.9 * 48 * GIB))
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12_288 + 8448
    assert plan.weights == 2 * (36 * layer + 2 * 151_936 * 4096 + 4096) == 16_381_470_720
    # Rank 16 beside each matrix: 16 x (columns + rows); three copies to compute with, four in float32.
    lora = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    assert plan.trained == (3 * 2 + 4 * 4) * 36 * lora == 960_233_472
    assert plan.cached_token == 2 * 36 * 8 * 128 * 2
    # Each block's input, and what the last norm keeps in float32.
    assert plan.kept_token == 36 * 4096 * 2 + 4 * 4096 + 4
    assert plan.learner(32_768) == 32_768 * (311_300 + plan.block_token) + 6 * 4 * 2**24
    # 4 096 tokens, whose norm is computed in float32; 256 requests; pages of 16 rows, of one layer.
    layer = 4096 * (2 * (2 * 4096 + 2 * 128 + 4 + 3 * 12_288) + 2 * 4 * 4096)
    logits, drawn, graphs = 256 * 151_936 * (2 + 4), 2**22 * 64, 4096 * 16 * 2 * 8 * 128 * 2
    fixed = layer + logits + drawn + graphs
    assert plan.forward.beside(32_768, 1000) == fixed + 32_768 * 4096 * 2 + 1000 * 2 * 4096
    free = plan.room - plan.weights
    assert plan.cache(8192, 8192) == int(0.4 * free) // 147_456
    left = free - plan.trained - plan.learner(32_768) - plan.forward.beside(32_768, 0)
    assert int(0.4 * free) > left > 32_768 * (147_456 + 8192)
    assert plan.cache(32_768, 32_768) == left // (147_456 + 8192)
    assert plan.room - 147_456 - 8192 < sum(plan.parts(32_768, 32_768).values()) <= plan.room
    assert plan.refusal(32_768, 32_768) is None
    assert plan.longest == 40_704
    assert not plan.fits(plan.longest + 256, plan.longest + 256)
    assert plan_memory(tmp_path, LoraSettings(), kind="cuda", room=16 * GIB).longest == 0


def test_a_4b_model_trains_on_24_gb_and_what_is_too_long_is_refused_with_the_length_that_fits(tmp_path):
    FOUR_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), kind="cuda", room=int(0.9 * 24 * GIB))
    layer = 2560 * 2 * (4096 + 1024) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert plan.weights == 2 * (36 * layer + 151_936 * 2560 + 2560) == 8_044_936_192
    assert plan.kept_token == 36 * 2560 * 2 + 4 * 2560 + 4
    assert plan.refusal(16_384, 16_384) is None
    refusal = plan.refusal(32_768, 32_768)
    assert refusal is not None
    assert (refusal.where, refusal.do) == ("seq_len", "set it to 24832 or less")
    assert plan.refusal(24_832, 24_832) is None


def test_the_micro_batch_gives_way_before_a_run_is_refused(tmp_path):
    EIGHT_BILLION.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, LoraSettings(), kind="cuda", room=int(0.9 * 24 * GIB))
    assert [plan.micro_batch(length, length) for length in (2048, 4096, 7168)] == [4096, 4096, 7168]
    assert plan.cache(2048, 2048) >= 2048
    assert sum(plan.parts(2048, 2048).values()) <= plan.room
    larger = plan_memory(tmp_path, LoraSettings(), kind="cuda", room=int(0.9 * 48 * GIB))
    assert larger.micro_batch(2048, 2048) == 16_384


def test_a_small_model_has_room_for_all_that_it_was_made_for(tmp_path):
    short = build_tiny_model(tmp_path, max_position_embeddings=100)
    assert plan_memory(short, LORA, kind="cpu", room=20 * GIB).longest == 100


def test_the_doctor_prints_the_plan_and_refuses_what_has_no_room(plan, tmp_path):
    EIGHT_BILLION.save_pretrained(tmp_path)
    model = {"name": str(tmp_path)}
    (fits,) = gpus.check(plan(gpus=[Gpu("A", 49_152)], model=model, seq_len=4096))
    assert fits.level is Level.GREEN
    assert "trials of 4096 tokens at once" in fits.what
    (long,) = gpus.check(plan(gpus=[Gpu("A", 49_152)], model=model, seq_len=40_960))
    assert long.level is Level.RED
    assert long.where == "run.toml: seq_len"
    shorter = int(long.do.split()[3])
    assert [f.level for f in gpus.check(plan(gpus=[Gpu("A", 49_152)], model=model, seq_len=shorter))] == [Level.GREEN]
    (large,) = gpus.check(plan(gpus=[Gpu("A", 16_384)], model=model, seq_len=4096))
    assert large.level is Level.RED
    assert large.where == "run.toml: model.name"


def test_layers_that_are_not_there_are_told_by_the_key(plan, folder, monkeypatch):
    monkeypatch.setattr(gpus, "SMALL", 0.0)
    lora = {"model": {"lora": {"target_modules": ["nothing"]}}}
    (finding,) = gpus.check(plan(model={"name": str(folder)}, trainer=lora))
    assert finding.level is Level.RED
    assert finding.where == "run.toml: trainer.model.lora.target_modules"


def test_a_config_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    with pytest.raises(UserError, match="config cannot be read"):
        plan_memory(tmp_path, LORA, kind="cpu", room=GIB)


def test_a_model_that_cannot_be_run_without_weights_is_estimated_by_its_size(plan, tmp_path, monkeypatch):
    folder = tmp_path / "Mine-0.1B"
    Qwen3MoeConfig(num_hidden_layers=1, hidden_size=64).save_pretrained(folder)

    def cannot(*_, **__):
        raise RuntimeError("depends on its content")

    monkeypatch.setattr(gpus, "SMALL", 0.0)
    monkeypatch.setattr(memory_count, "plan_memory", cannot)
    (finding,) = gpus.check(plan(model={"name": str(folder)}))
    assert "needs about" in finding.what


def test_the_private_side_of_torch_is_as_it_was():
    memory_count.COUPLINGS.check()
