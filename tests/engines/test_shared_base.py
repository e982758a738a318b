"""The base lies in memory once: sampler and learner share its weights, nobody writes into them, no number changes."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from loop_fakes import sample as tiny_sample
from sampler_setup import PROMPT, generate, logprobs_of, random_prompt
from small_world import SmallRun
from tiny_model import build_tiny_model, build_untied_model
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from harbortrainer.config.trainer_table import LoraSettings, LossSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.parts import hand_over, load_learner, start_sampler
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.sampled_model import load_model as load_for_sampling
from harbortrainer.engines.peft_internals import adapter_weights
from harbortrainer.engines.pretrained import load_model, second_model

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=8)
CLOCKS = ("time/", "perf/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def learner_of(folder, base=None, **changes) -> Learner:
    return Learner(folder, LORA, OptimSettings(lr=0.05), LossSettings(), base=base, **changes)


@pytest.fixture
def pair(folder):
    with Sampler(folder, model_name="policy", max_model_len=512, seed=3) as sampler:
        yield sampler, learner_of(folder, sampler.model)


def plain_name(name: str) -> str:
    """A weight's name without what peft puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def base_of(model) -> dict[str, torch.Tensor]:
    """The base's weights by their names, tied ones under each."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): weight for name, weight in named if "lora_" not in name}


def size_of(weights: Iterable[torch.Tensor]) -> int:
    """Bytes in memory, what is shared once."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    return sum(storages.values())


def sampled(sampler: Sampler, turn: int, count: int = 6) -> list[Sample]:
    """Samples of the version that samples now."""
    made = []
    for i in range(count):
        session = f"{turn}-{i}"
        generate(sampler.url, PROMPT, session=session, ignore_eos=True)
        (done,) = sampler.ledger.take(session)
        before, length = len(PROMPT), len(done.token_ids)
        made.append(
            Sample(
                token_ids=[*PROMPT, *done.token_ids],
                mask=[False] * before + [True] * length,
                logprobs=[0.0] * before + list(done.logprobs),
                versions=[0] * before + [done.version] * length,
                temperature=1.0,
                advantage=(-1.0) ** i,
                trial_name=session,
            )
        )
    return made


def test_every_weight_of_the_base_lies_in_memory_once(pair):
    sampler, learner = pair
    alone = size_of(sampler.model.parameters())
    hand_over(learner, sampler)
    ours, theirs = base_of(sampler.model), base_of(learner._policy.model)
    assert {name: w.data_ptr() for name, w in ours.items()} == {name: w.data_ptr() for name, w in theirs.items()}
    adapter = size_of(learner._policy.parameters)
    together = size_of([*sampler.model.parameters(), *learner._policy.model.parameters()])
    assert together == alone + 2 * adapter


def test_a_run_shares_them(tmp_path, folder):
    config = SmallRun(tmp_path).config
    sampler = start_sampler(str(folder), config)
    try:
        learner = load_learner(str(folder), config, sampler)
        ours, theirs = base_of(sampler.model), base_of(learner._policy.model)
    finally:
        sampler.stop()
    assert {name: w.data_ptr() for name, w in ours.items()} == {name: w.data_ptr() for name, w in theirs.items()}


def test_each_side_has_an_adapter_of_its_own_and_a_hand_over_copies_it(pair):
    sampler, learner = pair
    hand_over(learner, sampler)
    learner.train(sampled(sampler, 0))
    before = {name: w.clone() for name, w in adapter_weights(sampler.model, "policy").items()}
    assert any(w.any() for name, w in learner.weights(1).items() if "lora_B" in name)
    assert not any(w.any() for name, w in before.items() if "lora_B" in name), "training reached the sampler"
    hand_over(learner, sampler)
    assert all(torch.equal(w, before[name]) for name, w in adapter_weights(sampler.model, "policy").items())
    ours = adapter_weights(sampler.model, sampler._replies.engine.policy.adapter)
    theirs = {plain_name(name): w for name, w in adapter_weights(learner._policy.model, "default").items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(w, theirs[name]) for name, w in ours.items())
    assert not {w.data_ptr() for w in ours.values()} & {w.data_ptr() for w in theirs.values()}


def qwen3(path):
    return build_tiny_model(path, hidden=32)


def untied(path):
    return build_untied_model(path, hidden=32)


def gpt2(path):
    """Convolutions for matrices, learned positions, a tied head that has an adapter, dropout in the base."""
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(path)
    return path


def mistral(path):
    """A window: the sampler's attention is torch's with a mask."""
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(path)
    return path


def trained(model) -> list[torch.Tensor]:
    """Log-probabilities, entropies and every gradient of one pass over samples of different lengths."""
    lora = LoraSettings(rank=2, target_modules=["q_proj", "up_proj", "lm_head"])
    policy = LoraPolicy(model, lora, device=CPU, seed=0)
    policy.set_weights({n: torch.full_like(w, 0.01) for n, w in policy.weights().items()})
    found = []
    for batch in pack([lengthy(length) for length in (30, 9, 17)], 1000, CPU, packing=policy.packing):
        logprobs, entropies = policy.logprobs(batch, training=True)
        logprobs.sum().backward()
        found += [logprobs.detach(), entropies]
    gradients = [p.grad for p in policy.parameters if p.grad is not None]
    assert len(gradients) == len(policy.parameters)
    return found + gradients


def lengthy(length: int) -> Sample:
    mask = [t > 3 for t in range(length)]
    logprobs = [-1.0 * m for m in mask]
    return replace(
        tiny_sample(), token_ids=random_prompt(length, seed=length), mask=mask, logprobs=logprobs, versions=[0] * length
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [qwen3, untied, gpt2, mistral])
def test_log_probabilities_and_gradients_are_to_the_last_bit_those_of_a_model_of_its_own(tmp_path, make, dtype):
    path = make(tmp_path)
    sampled_from = load_for_sampling(path, device=CPU, dtype=dtype)
    own = trained(load_model(path, dtype, where="here"))
    shared = trained(second_model(sampled_from))
    assert all(torch.equal(one, other) for one, other in zip(own, shared, strict=True))
    assert own[0].abs().sum() > 0


def test_steps_are_to_the_last_bit_those_of_a_learner_that_loads(folder, pair):
    sampler, learner = pair
    loads = learner_of(folder)
    for turn in range(3):
        hand_over(learner, sampler)
        samples = sampled(sampler, turn)
        one, other = learner.train(samples), loads.train(samples)
        assert [(k, v) for k, v in one.items() if not k.startswith(CLOCKS)] == [
            (k, v) for k, v in other.items() if not k.startswith(CLOCKS)
        ]
    assert all(torch.equal(learner.weights()[name], weight) for name, weight in loads.weights().items())


def test_what_is_sampled_beside_training_is_what_is_sampled_alone(pair):
    sampler, learner = pair
    hand_over(learner, sampler)
    samples = sampled(sampler, 0)

    def ask(seed: int) -> dict:
        return generate(sampler.url, random_prompt(30, seed=seed), seed=5, max_tokens=40, ignore_eos=True)

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(learner.train, samples)
        beside = [ask(seed) for seed in range(4)]
        training.result(timeout=120)
    for one, other in zip(alone, beside, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5)


def test_nothing_that_a_run_does_writes_into_the_base(pair, tmp_path):
    sampler, learner = pair
    weights = base_of(sampler.model) | {f"learner/{n}": w for n, w in base_of(learner._policy.model).items()}
    before = {name: (weight._version, weight.clone()) for name, weight in weights.items()}
    hand_over(learner, sampler)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(2):
            samples = sampled(sampler, turn)
            beside = [pool.submit(generate, sampler.url, PROMPT, max_tokens=60, ignore_eos=True) for _ in range(3)]
            learner.train(samples, sampler.score_again())
            hand_over(learner, sampler)
            assert all(asked.result(timeout=120)["token_ids"] for asked in beside)
    learner.save(tmp_path / "step")
    learner.load(tmp_path / "step")
    hand_over(learner, sampler)
    for name, (version, kept) in before.items():
        assert weights[name]._version == version, f"{name} was written to"
        assert torch.equal(weights[name], kept), name


def test_a_write_in_the_middle_of_a_step_is_an_error_and_no_wrong_gradient(folder):
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32)
    policy = LoraPolicy(second_model(model), LORA, device=CPU, seed=0)
    (batch,) = pack([lengthy(20)], 1000, CPU)
    logprobs, _ = policy.logprobs(batch, training=True)
    with torch.no_grad():
        base_of(model)["model.layers.1.mlp.down_proj.weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_what_one_side_is_made_into_the_other_is_not(folder):
    model = load_for_sampling(folder, device=CPU, dtype=torch.float32)
    second = second_model(model)
    second.to(torch.bfloat16)
    second.train()
    assert {w.dtype for w in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert model.config is not second.config
    own = {b.data_ptr() for b in second.buffers()}
    assert own
    assert not own & {b.data_ptr() for b in model.buffers()}


def test_tied_weights_stay_tied_and_frozen(folder):
    second = second_model(load_for_sampling(folder, device=CPU, dtype=torch.float32))
    assert second.get_output_embeddings().weight is second.get_input_embeddings().weight
    assert not any(weight.requires_grad for weight in second.parameters())


def test_a_model_with_an_adapter_is_not_shared(folder, pair):
    sampler, learner = pair
    hand_over(learner, sampler)
    with pytest.raises(ValueError, match="before the first one is loaded"):
        learner_of(folder, sampler.model)
