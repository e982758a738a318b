"""The logits of chosen positions are those of the whole model, whatever it does behind its last matrix."""

from typing import Any

import pytest
import torch
from model_kinds import small_config
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from harbortrainer.engines.local.learner.trained_policy import token_logprobs
from harbortrainer.engines.output_head import OutputHead

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(1))
CHOSEN = torch.tensor([3, 4, 11, 23])
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "opt": {},
    "gpt2": {},
    "nanochat": {},  # a cap of 15, which logits of a fresh model hardly reach
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
def test_logits_of_some_positions_are_the_whole_models(kind):
    base = model(kind, **KINDS[kind])
    whole = base(input_ids=IDS, use_cache=False).logits[0]
    head = OutputHead(base, CPU)
    states = head.states(input_ids=IDS)
    assert states.shape == (24, 64), "not logits, whose memory nobody planned"
    torch.testing.assert_close(head.logits(states[CHOSEN]), whole[CHOSEN], atol=1e-6, rtol=1e-5)
    assert torch.equal(base(input_ids=IDS, use_cache=False).logits[0], whole), "the model is as it was"


@pytest.mark.parametrize("kind", ["llama", "nanochat"])
def test_gradients_in_chunks_are_those_of_the_whole(kind):
    base, targets = model(kind), IDS[0, CHOSEN]
    head = OutputHead(base, CPU)
    parameters = list(base.parameters())

    def gradients(logprobs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True)

    logits = base(input_ids=IDS, use_cache=False).logits[0, CHOSEN]
    expected = gradients(logits.log_softmax(-1).gather(-1, targets[:, None]))
    logprobs, _ = token_logprobs(
        head.states(input_ids=IDS)[CHOSEN], head.logits, targets, torch.ones(4), vocab=320, chunk_elements=320 * 3
    )
    for one, other in zip(gradients(logprobs), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_decoders_forward_that_somebody_else_has_put_there_stays():
    base = model("nanochat")
    decoder = base.get_decoder()
    decoder.forward = own = decoder.forward
    head = OutputHead(base, CPU)
    head.logits(head.states(input_ids=IDS)[CHOSEN])
    assert vars(decoder)["forward"] == own


class Peeks(Qwen3ForCausalLM):
    """Its logits are of more than its last hidden states."""

    def forward(self, input_ids, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + input_ids.float().mean() / 100
        return out


def test_a_model_whose_last_step_is_not_to_be_had_alone_is_asked_for_all_of_its_logits():
    torch.manual_seed(0)
    config = small_config("qwen3")
    assert isinstance(config, Qwen3Config)
    base = Peeks(config).eval()
    head = OutputHead(base, CPU)
    states = head.states(input_ids=IDS)
    torch.testing.assert_close(head.logits(states[CHOSEN]), base(input_ids=IDS, use_cache=False).logits[0, CHOSEN])
    assert states.shape == (24, 320)
