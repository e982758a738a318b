"""Grouped-query attention: same results, and on a GPU only inputs that a kernel supports."""

import pytest
import torch
from pretend_gpu import pretend_gpu
from torch.nn.functional import scaled_dot_product_attention

from harbortrainer.engines.attention import packed
from harbortrainer.engines.attention.packed import attend_in_groups

QUERIES, KEYS = 5, 9
MASK = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)


def reference_attention(query, key, value, mask):
    """Return [B, H, Q, D], with key heads repeated for each query head."""
    per_key_head = query.shape[1] // key.shape[1]
    scores = torch.stack([query[:, h] @ key[:, h // per_key_head].mT * 0.3 for h in range(query.shape[1])], dim=1)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.stack([weights[:, h] @ value[:, h // per_key_head] for h in range(query.shape[1])], dim=1)


@pytest.mark.parametrize("any_kernel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "masked", "width", "repeats"),
    [
        # Flash attention supports grouped heads; other kernels do in some releases only.
        (torch.bfloat16, False, 8, "never"),
        (torch.bfloat16, True, 8, "by version"),
        (torch.float32, False, 8, "by version"),
        (torch.float32, True, 8, "by version"),
        (torch.bfloat16, False, 320, "always"),
        (torch.float32, True, 320, "always"),
    ],
)
def test_repeats_heads_without_gqa_kernel(dtype, masked, width, repeats, any_kernel, monkeypatch):
    calls = []

    def attention(query, key, value, *, enable_gqa, **options):
        calls.append((key.shape[1], enable_gqa))
        return scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(packed, "_ALL_KERNELS_SUPPORT_GQA", any_kernel)
    monkeypatch.setattr(packed, "scaled_dot_product_attention", attention)
    generator = torch.Generator().manual_seed(0)
    sizes = (6, QUERIES), (2, KEYS if masked else QUERIES), (2, KEYS if masked else QUERIES)
    tensors = [torch.randn(1, *size, width, generator=generator).to(dtype) for size in sizes]
    mask = MASK if masked else torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    expected = reference_attention(*(x.double() for x in tensors), mask)
    on_cpu = attend_in_groups(*tensors, MASK if masked else None, 0.3)
    with pretend_gpu():
        gpu_tensors = [x.cuda() for x in tensors]
        on_gpu = attend_in_groups(*gpu_tensors, MASK.cuda() if masked else None, 0.3).cpu()
    repeated = repeats == "always" or (repeats == "by version" and not any_kernel)
    assert calls == [(2, True), (6, False) if repeated else (2, True)]
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for result in (on_cpu, on_gpu):
        assert torch.allclose(result.double(), expected, atol=bound * max(1, width / 32))


def test_does_not_repeat_ungrouped_heads():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, KEYS, 4, generator=generator) for _ in range(3))
    mask = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    assert torch.allclose(
        attend_in_groups(query, key, value, None, 0.3), reference_attention(query, key, value, mask), atol=1e-5
    )
