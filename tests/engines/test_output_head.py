"""The output head: logits of selected positions match the whole model, also with caps and scales after the matrix."""

from typing import Any

import pytest
import torch
from model_kinds import small_config
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from harbortrainer.engines.local.learner.output_head import OutputHead
from harbortrainer.engines.local.learner.trained_policy import token_logprobs

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([3, 4, 11, 23])
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "opt": {},
    "gpt2": {},
    "nanochat": {},  # a cap of 15; logits of a new model hardly reach it
    "gemma2": {},  # a cap of 30
    "gemma4": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 1.5},
    "falcon_h1": {"lm_head_multiplier": 0.5},
}


def model(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = small_config(kind)
    for name, value in settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_positions_match_whole_model(kind):
    base = model(kind, **KINDS[kind])
    whole = base(input_ids=IDS, use_cache=False).logits[0]
    head = OutputHead(base, CPU)
    states = head.states(input_ids=IDS)
    assert states.shape == (24, 64), "hidden states, not logits, which the memory plan does not include"
    torch.testing.assert_close(head.logits(states[POSITIONS]), whole[POSITIONS], atol=1e-6, rtol=1e-5)
    assert torch.equal(base(input_ids=IDS, use_cache=False).logits[0], whole), "the model is unchanged"


@pytest.mark.parametrize("kind", ["llama", "nanochat"])
def test_chunked_gradients_match_whole_model(kind):
    base, targets = model(kind), IDS[0, POSITIONS]
    head = OutputHead(base, CPU)
    parameters = list(base.parameters())

    def gradients(logprobs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True)

    logits = base(input_ids=IDS, use_cache=False).logits[0, POSITIONS]
    expected = gradients(logits.log_softmax(-1).gather(-1, targets[:, None]))
    logprobs, _ = token_logprobs(
        head.states(input_ids=IDS)[POSITIONS], head.logits, targets, torch.ones(4), vocab=320, chunk_elements=320 * 3
    )
    for ours, whole in zip(gradients(logprobs), expected, strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-6, rtol=1e-4)


def test_keeps_replaced_decoder_forward():
    base = model("nanochat")
    decoder = base.get_decoder()
    decoder.forward = replaced = decoder.forward
    head = OutputHead(base, CPU)
    head.logits(head.states(input_ids=IDS)[POSITIONS])
    assert vars(decoder)["forward"] == replaced


class InputDependentLogits(Qwen3ForCausalLM):
    """A model whose logits depend on more than its last hidden states."""

    def forward(self, input_ids, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + input_ids.float().mean() / 100
        return out


def test_model_with_unknown_head_computes_all_logits():
    torch.manual_seed(0)
    config = small_config("qwen3")
    assert isinstance(config, Qwen3Config)
    base = InputDependentLogits(config).eval()
    head = OutputHead(base, CPU)
    states = head.states(input_ids=IDS)
    torch.testing.assert_close(
        head.logits(states[POSITIONS]), base(input_ids=IDS, use_cache=False).logits[0, POSITIONS]
    )
    assert states.shape == (24, 320)
