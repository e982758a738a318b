"""peft's private API: the names exist and behave as assumed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from harbortrainer.engines.peft_internals import (
    PRIVATE_APIS,
    WRITTEN_FOR,
    adapter_weights,
    inject_for_sampling,
    inject_for_training,
    use_adapter,
)

LORA = LoraConfig(r=2, lora_alpha=6, target_modules=["up"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


@pytest.mark.parametrize("place", PRIVATE_APIS.places)
def test_private_api_exists(place):
    PRIVATE_APIS.check_place(place)


def test_adapter_weights_have_saved_names():
    model = Net()
    saved = get_peft_model_state_dict(get_peft_model(Net(), LORA))
    ours = inject_for_sampling(model, LORA, "policy", torch.float32)
    message = f"peft {WRITTEN_FOR} named parameters by layer and adapter; adapter_weights no longer finds them"
    assert ours.keys() == {name.removeprefix("base_model.model.") for name in saved}, message
    assert adapter_weights(model, "policy").keys() == ours.keys(), message
    assert adapter_weights(model, "another") == {}, message


def test_sampling_forward_matches_peft():
    ours, theirs = Net(), get_peft_model(Net(), LORA).eval()
    weights = inject_for_sampling(ours, LORA, "policy", torch.float32)
    state = {name: torch.randn_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.data.copy_(state[name])
    for name, weight in adapter_weights(theirs, "default").items():
        weight.data.copy_(state[name.removeprefix("base_model.model.")])
    x = torch.randn(5, 3)
    message = f"inject_for_sampling replaces the forward that peft {WRITTEN_FOR} gave lora.Linear, which has changed"
    with use_adapter("policy"):
        assert torch.allclose(ours(x), theirs(x), atol=1e-6), message


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_forward_and_gradients_match_peft(dropout):
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], lora_dropout=dropout)
    theirs = get_peft_model(_one_layer(seed=1), config).train()
    ours, _ = inject_for_training(_one_layer(seed=1), config)
    own, expected = (adapter_weights(model, "default") for model in (ours.train(), theirs))
    logits = []
    for model, weights in ((ours, own), (theirs, expected)):
        for number, weight in enumerate(weights.values()):
            weight.data = torch.sin(torch.arange(weight.numel()) + number).view(weight.shape)
        torch.manual_seed(0)
        logits.append(model(input_ids=torch.arange(6).view(2, 3)).logits)
        logits[-1].square().sum().backward()
    message = f"inject_for_training replaces the forward that peft {WRITTEN_FOR} gave lora.Linear, which has changed"
    assert torch.allclose(*logits, atol=1e-6), message
    for ours_, theirs_ in zip(own.values(), expected.values(), strict=True):
        assert ours_.grad is not None and theirs_.grad is not None
        assert ours_.grad.any() and torch.allclose(ours_.grad, theirs_.grad, atol=1e-5), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_and_training_round_alike(dtype):
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    base, ids = _one_layer(seed=1).to(dtype), torch.arange(12)[None]
    trained = inject_for_training(_one_layer(seed=1).to(dtype), config)[0].eval()
    sampled = inject_for_sampling(base, config, "policy", dtype)
    for number, (name, weight) in enumerate(adapter_weights(trained, "default").items()):
        assert weight.dtype == sampled[name.removeprefix("base_model.model.")].dtype == dtype
        weight.data = torch.sin(torch.arange(weight.numel()) + number).view(weight.shape).to(dtype)
        sampled[name.removeprefix("base_model.model.")].data.copy_(weight)
    with torch.no_grad(), use_adapter("policy"):
        assert torch.equal(trained(input_ids=ids).logits, base(input_ids=ids).logits)


def test_each_thread_uses_its_selected_adapter():
    model, x = Net(), torch.randn(5, 3)
    base = model(x)
    for number, name in enumerate(("policy", "policy1"), start=1):
        for weight in inject_for_sampling(model, LORA, name, torch.float32).values():
            weight.data.fill_(number)

    def compute(name: str | None) -> torch.Tensor:
        with use_adapter(name):
            return model(x)

    with ThreadPoolExecutor(1) as pool, use_adapter("policy1"):
        outputs = {name: pool.submit(compute, name).result() for name in (None, "policy")}
        assert torch.equal(model(x), compute("policy1"))
    assert torch.equal(outputs[None], base)
    assert torch.equal(model(x), base)
    # rank 2, alpha 6; both matrices are filled with 1, then with 2
    change = (6 / 2) * 2 * x.sum(-1, keepdim=True).expand(-1, 4)
    assert torch.allclose(outputs["policy"] - base, change, atol=1e-5)
    assert torch.allclose(compute("policy1") - base, 4 * change, atol=1e-5)


def test_new_adapter_is_zero_and_dropout_is_returned():
    dropout = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
    for config, count in ((dropout, 1), (LoraConfig(r=2, target_modules=["q_proj"]), 0)):
        model, dropouts = inject_for_training(_one_layer(), config)
        weights = adapter_weights(model, "default")
        message = f"peft {WRITTEN_FOR} called the wrapped adapter default and its dropouts lora_dropout"
        assert [p for p in model.parameters() if p.requires_grad] == [*weights.values()], message
        assert len(dropouts) == count, message
        assert all(not weight.any() for name, weight in weights.items() if "lora_B" in name), message


def _one_layer(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
