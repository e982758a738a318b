"""Matrix products in blocks: same results, for layers and for the output matrix."""

import pytest
import torch
from sampler_setup import LORA, Reference, agrees, generate, random_adapter
from tiny_model import build_tiny_model

from harbortrainer.engines import block_product
from harbortrainer.engines.block_product import is_faster_in_blocks, multiply
from harbortrainer.engines.local.sampler import Sampler


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 300])
@pytest.mark.parametrize("shape", [(300, 40), (256, 64), (1000, 128)])
def test_blocks_give_same_product(rows, shape):
    inputs, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    assert torch.allclose(multiply(inputs, weight), inputs @ weight.t(), atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "faster"),
    [
        (torch.empty(12_288, 1024), True),
        (torch.empty(3072, 1024), False),
        (torch.empty(12_288, 4096, dtype=torch.bfloat16), False),
        (torch.empty(12_288, 4096, device="meta"), False),
    ],
)
def test_uses_blocks_for_large_float32_weights_on_cpu(weight, faster):
    assert is_faster_in_blocks(weight) == faster


def test_model_output_is_the_same_in_blocks(tmp_path, monkeypatch):
    folder, multiplied = build_tiny_model(tmp_path), set()
    original = block_product.multiply
    monkeypatch.setattr(block_product, "_MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(
        "harbortrainer.engines.peft_internals.multiply",
        lambda rows, weight: (multiplied.add(tuple(weight.shape)), original(rows, weight))[1],
    )
    adapter = random_adapter(folder, seed=1)
    with Sampler(folder, max_model_len=256) as sampler:
        sampler.load_adapter(adapter, 1, config=LORA)
        choice = generate(sampler.url, list(range(5, 45)), max_tokens=20, ignore_eos=True)
        head, layer = sampler.model.get_output_embeddings(), sampler.model.get_decoder().layers[0].mlp.up_proj
        assert agrees(choice, Reference(folder, adapter), list(range(5, 45)))
        assert {tuple(head.weight.shape), tuple(layer.base_layer.weight.shape)} <= multiplied
