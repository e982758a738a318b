"""Batched sampling: log-probabilities match a plain forward pass, and tokens do not depend on the batch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampler_setup import generate, http, logprobs_of, random_prompt
from tiny_model import build_tiny_model
from torch.nn.functional import scaled_dot_product_attention

from harbortrainer.engines.attention.paged import attend
from harbortrainer.engines.attention.plan import Planner, Query
from harbortrainer.engines.local.sampler import Sampler


@pytest.fixture(scope="module")
def sampler(folder):
    with Sampler(folder, seed=3, max_model_len=1024) as running:
        yield running


def generate_together(url: str, prompts: list[list[int]], **sampling) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: generate(url, p, **sampling), prompts))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_match_plain_forward_pass(sampler, reference, temperature):
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 40, 41, 130, 300, 700)]
    choices = generate_together(sampler.url, prompts, temperature=temperature, max_tokens=24, ignore_eos=True)
    for prompt, choice in zip(prompts, choices, strict=True):
        expected = reference.logprobs(prompt, choice["token_ids"], temperature)
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_shared_prefixes_do_not_change_logprobs(sampler, reference):
    beginning = random_prompt(100, seed=1)
    prompts = [beginning + random_prompt(i + 1, seed=i) for i in range(6)]
    generate(sampler.url, beginning)
    for prompt, choice in zip(prompts, generate_together(sampler.url, prompts, ignore_eos=True), strict=True):
        expected = reference.logprobs(prompt, choice["token_ids"])
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_same_tokens_alone_and_in_a_batch(sampler):
    prompt = random_prompt(50, seed=9)
    alone = generate(sampler.url, prompt, seed=5, max_tokens=40, ignore_eos=True)
    prompts = [prompt] + [random_prompt(n, seed=n) for n in (3, 30, 200, 90)]
    batched = generate_together(sampler.url, prompts, seed=5, max_tokens=40, ignore_eos=True)[0]
    assert batched["token_ids"] == alone["token_ids"]
    assert logprobs_of(batched) == pytest.approx(logprobs_of(alone), abs=1e-5)


def test_another_seed_gives_other_tokens(sampler):
    prompt = random_prompt(20, seed=4)
    first, second = (generate(sampler.url, prompt, seed=s, ignore_eos=True)["token_ids"] for s in (1, 2))
    assert first != second


def test_session_is_reproducible_by_run_seed(folder, sampler):
    prompt = random_prompt(20, seed=4)

    def session(url: str, name: str) -> list[list[int]]:
        return [generate(url, prompt, session=name, ignore_eos=True)["token_ids"] for _ in range(2)]

    first = session(sampler.url, "one")
    assert first[0] != first[1]
    sampler.completion_log.pop("one")
    assert session(sampler.url, "one") == first
    assert session(sampler.url, "two") != first
    with Sampler(folder, seed=4, max_model_len=1024) as other:
        assert session(other.url, "one") != first


def test_parallel_identical_requests_get_different_answers(sampler):
    prompts = [random_prompt(20, seed=4)] * 6
    answers = {
        tuple(c["token_ids"]) for c in generate_together(sampler.url, prompts, session="at once", ignore_eos=True)
    }
    assert len(answers) == len(prompts)


def test_temperature_zero_is_greedy(sampler, reference):
    prompt = random_prompt(30, seed=2)
    tokens = generate(sampler.url, prompt, temperature=0, ignore_eos=True)["token_ids"]
    with torch.no_grad():
        logits = reference.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def test_top_k_one_is_greedy_with_logprob_zero(sampler):
    choice = generate(sampler.url, random_prompt(10, seed=1), top_k=1)
    assert logprobs_of(choice) == [0.0] * len(choice["token_ids"])


def test_frequencies_follow_model_distribution(sampler, reference):
    prompt = random_prompt(12, seed=8)
    counts = torch.zeros(320)
    for seed in range(40):
        body = {"max_tokens": 1, "n": 64, "seed": seed}
        for choice in _choices(sampler.url, prompt, **body):
            counts[choice["token_ids"][0]] += 1
    with torch.no_grad():
        expected = reference.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert (counts / counts.sum() - expected).abs().max() < 0.03


def _choices(url: str, prompt: list[int], **sampling) -> list[dict]:

    reply = http.post(
        f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}, timeout=60
    )
    reply.raise_for_status()
    return reply.json()["choices"]


def test_preempted_requests_stay_exact(folder, reference, monkeypatch):
    from harbortrainer.engines import memory_parts

    monkeypatch.setattr(memory_parts, "_CPU_CACHE_BYTES", 0)
    prompts = [random_prompt(40 + i, seed=i) for i in range(16)]
    with Sampler(folder, seed=3, max_model_len=256) as small:
        assert small.stats()["cache_tokens"] < 16 * 200
        choices = generate_together(small.url, prompts, seed=1, max_tokens=160, ignore_eos=True)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert len(choice["token_ids"]) == 160
        expected = reference.logprobs(prompt, choice["token_ids"])
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_sliding_window_uses_transformers_attention(tmp_path):
    from transformers import AutoConfig

    from harbortrainer.engines.local.sampler.sampled_model import attention_for

    config = AutoConfig.from_pretrained(build_tiny_model(tmp_path))
    assert attention_for(config) == "ragged"
    config.layer_types = ["full_attention", "sliding_attention"]
    assert attention_for(config) == "sdpa"


def test_transformers_attention_gives_same_logprobs(folder, reference, monkeypatch):
    from harbortrainer.engines.local.sampler import sampled_model as loading

    monkeypatch.setattr(loading, "attention_for", lambda config: "sdpa")
    prompts = [random_prompt(n, seed=n) for n in (4, 60, 33)]
    with Sampler(folder, max_model_len=256) as plain:
        for prompt, choice in zip(prompts, generate_together(plain.url, prompts, ignore_eos=True), strict=True):
            expected = reference.logprobs(prompt, choice["token_ids"])
            assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_plan_reads_whole_pages_and_masks_foreign_keys():
    # 3 keys in block 7; 40 in blocks 2, 0, 5; a new prompt in 9 and 8; the end of a prompt in 1 and 6. Each request has
    # one block more than it needs. A block has 6 pages.
    requests = [Query(1, 3, [7, 4]), Query(1, 40, [2, 0, 5, 3]), Query(20, 20, [9, 8, 4]), Query(18, 30, [1, 6, 4])]
    plan = Planner(16, stride=6, heads_per_kv=1).plan(requests)
    (batch,) = plan.batches
    assert (batch.size, batch.rows.tolist()) == ((2, 1, 1), [0, 1])
    assert batch.own_pages.view(2, -1).tolist() == [[42, 42, 42], [12, 0, 30]]
    assert batch.own_mask.isfinite().flatten(1).sum(-1).tolist() == [3, 40]
    new, continued = plan.prefills
    assert (new.begin, new.end, new.pages, new.mask) == (2, 22, None, None)
    assert continued.pages is not None and continued.mask is not None
    assert (continued.begin, continued.end, continued.pages.tolist()) == (22, 40, [6, 36])
    assert continued.mask.isfinite().sum(-1).tolist() == list(range(13, 31))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefix_is_read_once_and_attention_is_exact(dtype):
    page, group = 16, torch.Generator().manual_seed(0)
    # Decoding: three trials with a common prefix, two with another one, two alone. Then prompts: the last tokens of
    # three with a common prefix and of one without, and 26 tokens of a long one.
    first, second = list(range(10)), [*range(3), *range(20, 28)]
    tables = [[*first, 11], [*first, 12, 13], [*first[:9], 14], [*second, 15], [*second, 16], [0, 1, 17], [18]]
    tables += [[*first[:5], 19], [*first[:5], 28], [*first[:5], 29], [30, 31], [*first[:4], 32, 33]]
    lengths, queries = [163, 180, 150, 177, 192, 40, 5, 85, 96, 90, 20, 90], [1] * 7 + [3, 16, 10, 2, 26]
    requests = [Query(*each) for each in zip(queries, lengths, tables, strict=True)]
    plan = Planner(page, stride=2, heads_per_kv=3, dtype=dtype).plan(requests)
    shared = {(b.size, tuple(b.prefix_pages.tolist())) for b in plan.batches if b.prefix_pages is not None}
    # With padding: four requests of the first prefix, two of the second, and three prompts.
    prefixes = [*first, 9, *second]
    assert shared == {
        ((2, 4, 1), tuple(2 * block for block in prefixes)), ((1, 3, 16), tuple(2 * block for block in first[:5]))
    }  # fmt: skip
    pages = [torch.randn(80, page, 2, 8, generator=group).to(dtype) for _ in range(2)]
    query = torch.randn(1, 6, sum(queries), 8, generator=group).to(dtype)
    own = torch.empty(sum(queries), 2, 8, dtype=dtype)
    attended = attend(plan, query, (own, own), (pages[0], pages[1]), None)
    begin = 0
    for request in requests:
        k, v = (x[::2][list(request.table)].flatten(0, 1)[: request.keys].transpose(0, 1)[None].float() for x in pages)
        q = query[:, :, begin : begin + request.queries].float()
        visible = torch.ones(request.queries, request.keys, dtype=torch.bool).tril(request.keys - request.queries)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
        computed = attended[0, begin : begin + request.queries].float()
        assert torch.allclose(computed, expected, atol=1e-5 if dtype == torch.float32 else 0.02)
        begin += request.queries


def test_updated_plan_equals_new_plan():
    common, planner, generator = list(range(6)), Planner(16, stride=1, heads_per_kv=2), torch.Generator().manual_seed(0)
    pages = [torch.randn(40, 16, 2, 8, generator=generator) for _ in range(2)]
    tables = [[*common, 10], [*common, 11], [*common[:4], 12], [20, 21]]
    for step in range(20):
        # The third request ends after 3 steps; the first one needs another page after 6.
        own = [[*tables[0], *([13] if step > 6 else [])], *tables[1:]]
        requests = [Query(1, keys + step, own[i]) for i, keys in enumerate((105, 97, 65, 18)) if i != 2 or step < 3]
        if step > 12:
            requests = [request for request in requests if request.keys <= 16 * len(request.table)]
        query = torch.randn(1, 4, len(requests), 8, generator=generator)
        nothing = torch.empty(len(requests), 2, 8)
        updated, fresh = (
            attend(p.plan(requests), query, (nothing, nothing), (pages[0], pages[1]), None)
            for p in (planner, Planner(16, stride=1, heads_per_kv=2))
        )
        assert torch.allclose(updated, fresh, atol=1e-6)
