"""Heads of the queries that share a head of the keys: the same numbers, and on a GPU only what a kernel takes."""

import pytest
import torch
from pretend_gpu import pretend_gpu
from torch.nn.functional import scaled_dot_product_attention

from harbortrainer.engines import grouped_attention
from harbortrainer.engines.grouped_attention import attend_in_groups

QUERIES, KEYS = 5, 9
MASK = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)


def by_hand(query, key, value, mask):
    """[B, H, Q, D], each head of the queries with its own."""
    each = query.shape[1] // key.shape[1]
    scores = torch.stack([query[:, h] @ key[:, h // each].mT * 0.3 for h in range(query.shape[1])], dim=1)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.stack([weights[:, h] @ value[:, h // each] for h in range(query.shape[1])], dim=1)


@pytest.mark.parametrize("any_kernel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "masked", "width", "repeats"),
    [
        # What flash attention takes goes as it is; what another kernel has to take, where it takes shared heads.
        (torch.bfloat16, False, 8, "never"),
        (torch.bfloat16, True, 8, "by version"),
        (torch.float32, False, 8, "by version"),
        (torch.float32, True, 8, "by version"),
        (torch.bfloat16, False, 320, "always"),
        (torch.float32, True, 320, "always"),
    ],
)
def test_on_a_gpu_heads_are_repeated_where_no_kernel_takes_shared_ones(
    dtype, masked, width, repeats, any_kernel, monkeypatch
):
    given = []

    def attention(query, key, value, *, enable_gqa, **options):
        given.append((key.shape[1], enable_gqa))
        return scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(grouped_attention, "_ANY_KERNEL_GROUPS", any_kernel)
    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", attention)
    noise = torch.Generator().manual_seed(0)
    sizes = (6, QUERIES), (2, KEYS if masked else QUERIES), (2, KEYS if masked else QUERIES)
    tensors = [torch.randn(1, *size, width, generator=noise).to(dtype) for size in sizes]
    mask = MASK if masked else torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    expected = by_hand(*(x.double() for x in tensors), mask)
    on_cpu = attend_in_groups(*tensors, MASK if masked else None, 0.3)
    with pretend_gpu():
        moved = [x.cuda() for x in tensors]
        on_gpu = attend_in_groups(*moved, MASK.cuda() if masked else None, 0.3).cpu()
    repeated = repeats == "always" or (repeats == "by version" and not any_kernel)
    assert given == [(2, True), (6, False) if repeated else (2, True)]
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for result in (on_cpu, on_gpu):
        assert torch.allclose(result.double(), expected, atol=bound * max(1, width / 32))


def test_where_each_head_has_its_own_nothing_is_repeated():
    noise = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, KEYS, 4, generator=noise) for _ in range(3))
    mask = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    assert torch.allclose(attend_in_groups(query, key, value, None, 0.3), by_hand(query, key, value, mask), atol=1e-5)
