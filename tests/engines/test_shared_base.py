"""The shared base: one copy of the weights for sampler and learner, never written to, with identical results."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from loop_fakes import sample as tiny_sample
from sampler_setup import PROMPT, generate, logprobs_of, random_prompt
from scripted_run import ScriptedRun
from tiny_model import build_tiny_model, build_untied_model
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM
from transformers.utils.logging import enable_progress_bar

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.factories import load_learner, start_sampler
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.sampled_model import load_model as load_for_sampling
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.engines.models import load_model, share_weights
from harbortrainer.engines.peft_internals import adapter_weights

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=8)
TIMINGS = ("time/", "perf/")


def learner_of(folder, base=None, **changes) -> Learner:
    return Learner(folder, LORA, OptimSettings(lr=0.05), DefaultLoss(), base=base, **changes)


@pytest.fixture
def pair(folder):
    with Sampler(folder, model_name="policy", max_model_len=512, seed=3) as sampler:
        yield sampler, learner_of(folder, sampler.model)


def plain_name(name: str) -> str:
    """Return a weight's name without peft's prefix and suffix."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def base_of(model) -> dict[str, torch.Tensor]:
    """Return the base's weights by name, tied ones under every name."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): weight for name, weight in named if "lora_" not in name}


def size_of(weights: Iterable[torch.Tensor]) -> int:
    """Return the bytes in memory, shared storages once."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    return sum(storages.values())


def sample_batch(sampler: Sampler, turn: int, count: int = 6) -> list[Sample]:
    """Return samples of the current version."""
    made = []
    for i in range(count):
        session = f"{turn}-{i}"
        generate(sampler.url, PROMPT, session=session, ignore_eos=True)
        (completion,) = sampler.completion_log.pop(session)
        before, length = len(PROMPT), len(completion.token_ids)
        made.append(
            Sample(
                token_ids=[*PROMPT, *completion.token_ids],
                mask=[False] * before + [True] * length,
                logprobs=[0.0] * before + list(completion.logprobs),
                versions=[0] * before + [completion.version] * length,
                temperature=1.0,
                advantage=(-1.0) ** i,
                trial_name=session,
            )
        )
    return made


def test_base_weights_are_in_memory_once(pair):
    sampler, learner = pair
    alone = size_of(sampler.model.parameters())
    update_weights(learner, sampler)
    ours, theirs = base_of(sampler.model), base_of(learner._policy.model)
    assert {name: w.data_ptr() for name, w in ours.items()} == {name: w.data_ptr() for name, w in theirs.items()}
    adapter = size_of(learner._policy.parameters)
    together = size_of([*sampler.model.parameters(), *learner._policy.model.parameters()])
    assert together == alone + 2 * adapter


def test_run_shares_base(tmp_path, folder):
    config = ScriptedRun(tmp_path).config
    sampler = start_sampler(str(folder), config)
    try:
        learner = load_learner(str(folder), config, sampler)
        ours, theirs = base_of(sampler.model), base_of(learner._policy.model)
    finally:
        sampler.stop()
    assert {name: w.data_ptr() for name, w in ours.items()} == {name: w.data_ptr() for name, w in theirs.items()}


def test_sampler_and_learner_have_own_adapters(pair):
    sampler, learner = pair
    update_weights(learner, sampler)
    learner.train(sample_batch(sampler, 0))
    before = {name: w.clone() for name, w in adapter_weights(sampler.model, "policy").items()}
    assert any(w.any() for name, w in learner.weights(1).items() if "lora_B" in name)
    assert not any(w.any() for name, w in before.items() if "lora_B" in name), "training reached the sampler"
    update_weights(learner, sampler)
    assert all(torch.equal(w, before[name]) for name, w in adapter_weights(sampler.model, "policy").items())
    ours = adapter_weights(sampler.model, sampler._handler.engine.policy.adapter)
    theirs = {plain_name(name): w for name, w in adapter_weights(learner._policy.model, "default").items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(w, theirs[name]) for name, w in ours.items())
    assert not {w.data_ptr() for w in ours.values()} & {w.data_ptr() for w in theirs.values()}


def qwen3(path):
    return build_tiny_model(path, hidden=32)


def untied(path):
    return build_untied_model(path, hidden=32)


def gpt2(path):
    """A model with convolutions as matrices, learned positions, an adapter on the tied head, dropout in the base."""
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(path)
    return path


def mistral(path):
    """A windowed model: the sampler uses torch's attention with a mask."""
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(path)
    return path


def pass_results(model) -> list[torch.Tensor]:
    """Return log-probabilities, entropies and all gradients of one pass over samples of different lengths."""
    lora = LoraSettings(rank=2, target_modules=["q_proj", "up_proj", "lm_head"])
    policy = LoraPolicy(model, lora, device=CPU, seed=0)
    policy.set_weights({n: torch.full_like(w, 0.01) for n, w in policy.weights().items()})
    found = []
    for batch in pack([sample_of_length(length) for length in (30, 9, 17)], 1000, CPU, packing=policy.packing):
        logprobs, entropies = policy.logprobs(batch, training=True)
        logprobs.sum().backward()
        found += [logprobs.detach(), entropies]
    gradients = [p.grad for p in policy.parameters if p.grad is not None]
    assert len(gradients) == len(policy.parameters)
    return found + gradients


def sample_of_length(length: int) -> Sample:
    """Return a sample of this length; all tokens after the fourth are sampled."""
    mask = [t > 3 for t in range(length)]
    logprobs = [-1.0 * m for m in mask]
    return replace(
        tiny_sample(), token_ids=random_prompt(length, seed=length), mask=mask, logprobs=logprobs, versions=[0] * length
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [qwen3, untied, gpt2, mistral])
def test_shared_base_gives_bit_identical_logprobs_and_gradients(tmp_path, make, dtype):
    path = make(tmp_path)
    sampled_model = load_for_sampling(path, device=CPU, dtype=dtype)
    own = pass_results(load_model(path, dtype, where="here"))
    shared = pass_results(share_weights(sampled_model))
    assert all(torch.equal(one, other) for one, other in zip(own, shared, strict=True))
    assert own[0].abs().sum() > 0


def test_steps_are_bit_identical_to_separate_learner(folder, pair):
    sampler, learner = pair
    separate = learner_of(folder)
    for turn in range(3):
        update_weights(learner, sampler)
        samples = sample_batch(sampler, turn)
        shared_metrics, separate_metrics = learner.train(samples), separate.train(samples)
        assert [(k, v) for k, v in shared_metrics.items() if not k.startswith(TIMINGS)] == [
            (k, v) for k, v in separate_metrics.items() if not k.startswith(TIMINGS)
        ]
    assert all(torch.equal(learner.weights()[name], weight) for name, weight in separate.weights().items())


def test_training_does_not_change_concurrent_sampling(pair):
    sampler, learner = pair
    update_weights(learner, sampler)
    samples = sample_batch(sampler, 0)

    def request_completion(seed: int) -> dict:
        return generate(sampler.url, random_prompt(30, seed=seed), seed=5, max_tokens=40, ignore_eos=True)

    alone = [request_completion(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(learner.train, samples)
        during = [request_completion(seed) for seed in range(4)]
        training.result(timeout=120)
    for before, now in zip(alone, during, strict=True):
        assert before["token_ids"] == now["token_ids"]
        assert logprobs_of(before) == pytest.approx(logprobs_of(now), abs=1e-5)


def test_run_does_not_write_to_base(pair, tmp_path):
    sampler, learner = pair
    weights = base_of(sampler.model) | {f"learner/{n}": w for n, w in base_of(learner._policy.model).items()}
    before = {name: (weight._version, weight.clone()) for name, weight in weights.items()}
    update_weights(learner, sampler)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(2):
            samples = sample_batch(sampler, turn)
            during = [pool.submit(generate, sampler.url, PROMPT, max_tokens=60, ignore_eos=True) for _ in range(3)]
            learner.train(samples, sampler.rescore())
            update_weights(learner, sampler)
            assert all(request.result(timeout=120)["token_ids"] for request in during)
    learner.save(tmp_path / "step")
    learner.load(tmp_path / "step")
    update_weights(learner, sampler)
    for name, (version, kept) in before.items():
        assert weights[name]._version == version, f"{name} was written to"
        assert torch.equal(weights[name], kept), name


def test_write_during_step_is_an_error(folder):
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32)
    policy = LoraPolicy(share_weights(model), LORA, device=CPU, seed=0)
    (batch,) = pack([sample_of_length(20)], 1000, CPU)
    logprobs, _ = policy.logprobs(batch, training=True)
    with torch.no_grad():
        base_of(model)["model.layers.1.mlp.down_proj.weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_sampler_and_learner_have_separate_modules_and_modes(folder):
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32)
    second = share_weights(model)
    second.to(torch.bfloat16)
    second.train()
    assert {w.dtype for w in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert model.config is not second.config
    own = {b.data_ptr() for b in second.buffers()}
    assert own
    assert not own & {b.data_ptr() for b in model.buffers()}


def test_tied_weights_stay_tied_and_frozen(folder):
    second = share_weights(load_for_sampling(folder, device=CPU, dtype=torch.float32))
    assert second.get_output_embeddings().weight is second.get_input_embeddings().weight
    assert not any(weight.requires_grad for weight in second.parameters())


def test_refuses_to_share_model_with_adapter(folder, pair):
    sampler, learner = pair
    update_weights(learner, sampler)
    with pytest.raises(ValueError, match="before the first one is loaded"):
        learner_of(folder, sampler.model)


def test_folder_is_loaded_without_a_progress_bar(tmp_path, capfd):
    enable_progress_bar()
    folder = build_tiny_model(tmp_path / "model")
    capfd.readouterr()
    load_model(folder, torch.float32, where="model")
    assert capfd.readouterr().err == ""
