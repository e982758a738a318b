"""Sampling in a batch: the same log-probabilities as a plain forward pass, the same tokens in any company."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampler_setup import generate, logprobs_of, random_prompt
from tiny_model import build_tiny_model
from torch.nn.functional import scaled_dot_product_attention

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.ragged_attention import attend
from harbortrainer.engines.ragged_plan import Asking, Planner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sampler(folder):
    with Sampler(folder, seed=3, max_model_len=1024) as running:
        yield running


def together(url: str, prompts: list[list[int]], **sampling) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: generate(url, p, **sampling), prompts))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass(sampler, reference, temperature):
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 40, 41, 130, 300, 700)]
    choices = together(sampler.url, prompts, temperature=temperature, max_tokens=24, ignore_eos=True)
    for prompt, choice in zip(prompts, choices, strict=True):
        expected = reference.logprobs(prompt, choice["token_ids"], temperature)
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_shared_beginnings_do_not_change_the_logprobs(sampler, reference):
    beginning = random_prompt(100, seed=1)
    prompts = [beginning + random_prompt(i + 1, seed=i) for i in range(6)]
    generate(sampler.url, beginning)
    for prompt, choice in zip(prompts, together(sampler.url, prompts, ignore_eos=True), strict=True):
        expected = reference.logprobs(prompt, choice["token_ids"])
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_a_request_gets_the_same_tokens_alone_and_in_company(sampler):
    prompt = random_prompt(50, seed=9)
    alone = generate(sampler.url, prompt, seed=5, max_tokens=40, ignore_eos=True)
    company = [prompt] + [random_prompt(n, seed=n) for n in (3, 30, 200, 90)]
    crowded = together(sampler.url, company, seed=5, max_tokens=40, ignore_eos=True)[0]
    assert crowded["token_ids"] == alone["token_ids"]
    assert logprobs_of(crowded) == pytest.approx(logprobs_of(alone), abs=1e-5)


def test_another_seed_gives_other_tokens(sampler):
    prompt = random_prompt(20, seed=4)
    first, second = (generate(sampler.url, prompt, seed=s, ignore_eos=True)["token_ids"] for s in (1, 2))
    assert first != second


def test_a_session_repeats_under_the_same_run_seed_and_differs_under_another(folder, sampler):
    prompt = random_prompt(20, seed=4)

    def session(url: str, name: str) -> list[list[int]]:
        return [generate(url, prompt, session=name, ignore_eos=True)["token_ids"] for _ in range(2)]

    first = session(sampler.url, "one")
    assert first[0] != first[1]
    sampler.ledger.take("one")
    assert session(sampler.url, "one") == first
    assert session(sampler.url, "two") != first
    with Sampler(folder, seed=4, max_model_len=1024) as other:
        assert session(other.url, "one") != first


def test_a_session_that_asks_the_same_at_once_is_not_given_the_same_answer(sampler):
    asked = [random_prompt(20, seed=4)] * 6
    answers = {tuple(c["token_ids"]) for c in together(sampler.url, asked, session="at once", ignore_eos=True)}
    assert len(answers) == len(asked)


def test_temperature_zero_is_the_likeliest_continuation(sampler, reference):
    prompt = random_prompt(30, seed=2)
    tokens = generate(sampler.url, prompt, temperature=0, ignore_eos=True)["token_ids"]
    with torch.no_grad():
        logits = reference.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def test_top_k_one_is_greedy_with_certainty(sampler):
    choice = generate(sampler.url, random_prompt(10, seed=1), top_k=1)
    assert logprobs_of(choice) == [0.0] * len(choice["token_ids"])


def test_frequencies_follow_the_models_distribution(sampler, reference):
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
    import httpx

    reply = httpx.post(
        f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}, timeout=60
    )
    reply.raise_for_status()
    return reply.json()["choices"]


def test_more_requests_than_the_cache_holds_start_again_and_stay_exact(folder, reference, monkeypatch):
    from harbortrainer.engines import cache_size

    monkeypatch.setattr(cache_size, "_CPU_CACHE_BYTES", 0)
    prompts = [random_prompt(40 + i, seed=i) for i in range(16)]
    with Sampler(folder, seed=3, max_model_len=256) as small:
        assert small.stats()["cache_tokens"] < 16 * 200
        choices = together(small.url, prompts, seed=1, max_tokens=160, ignore_eos=True)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert len(choice["token_ids"]) == 160
        expected = reference.logprobs(prompt, choice["token_ids"])
        assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_models_with_sliding_windows_fall_back_to_transformers_attention(tmp_path):
    from transformers import AutoConfig

    from harbortrainer.engines.local.sampler.sampled_model import attention_for

    config = AutoConfig.from_pretrained(build_tiny_model(tmp_path))
    assert attention_for(config) == "ragged"
    config.layer_types = ["full_attention", "sliding_attention"]
    assert attention_for(config) == "sdpa"


def test_transformers_attention_gives_the_same_logprobs(folder, reference, monkeypatch):
    from harbortrainer.engines.local.sampler import sampled_model as loading

    monkeypatch.setattr(loading, "attention_for", lambda config: "sdpa")
    prompts = [random_prompt(n, seed=n) for n in (4, 60, 33)]
    with Sampler(folder, max_model_len=256) as plain:
        for prompt, choice in zip(prompts, together(plain.url, prompts, ignore_eos=True), strict=True):
            expected = reference.logprobs(prompt, choice["token_ids"])
            assert torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def test_a_plan_reads_whole_pages_and_masks_what_is_not_the_requests_own():
    # 3 keys in block 7, 40 in blocks 2, 0, 5, a fresh prompt in 9 and 8, and the end of one in 1 and 6. Each has a
    # block more than it needs, and a block has 6 pages.
    asking = [Asking(1, 3, [7, 4]), Asking(1, 40, [2, 0, 5, 3]), Asking(20, 20, [9, 8, 4]), Asking(18, 30, [1, 6, 4])]
    plan = Planner(16, stride=6, each=1).plan(asking)
    (bundle,) = plan.bundles
    assert (bundle.size, bundle.rows.tolist()) == ((2, 1, 1), [0, 1])
    assert bundle.own.view(2, -1).tolist() == [[42, 42, 42], [12, 0, 30]]
    assert bundle.real.isfinite().flatten(1).sum(-1).tolist() == [3, 40]
    fresh, going_on = plan.prefills
    assert (fresh.begin, fresh.end, fresh.pages, fresh.mask) == (2, 22, None, None)
    assert going_on.pages is not None and going_on.mask is not None
    assert (going_on.begin, going_on.end, going_on.pages.tolist()) == (22, 40, [6, 36])
    assert going_on.mask.isfinite().sum(-1).tolist() == list(range(13, 31))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_that_requests_begin_with_are_read_once_and_each_meets_its_own_keys_alone(dtype):
    page, group = 16, torch.Generator().manual_seed(0)
    # Three trials of a group, two of another that share less with them, one of a third, one with nothing shared; then
    # the last tokens of three prompts that begin alike, of one that does not, and a long end of a prompt.
    first, second = list(range(10)), [*range(3), *range(20, 28)]
    tables = [[*first, 11], [*first, 12, 13], [*first[:9], 14], [*second, 15], [*second, 16], [0, 1, 17], [18]]
    tables += [[*first[:5], 19], [*first[:5], 28], [*first[:5], 29], [30, 31], [*first[:4], 32, 33]]
    lengths, queries = [163, 180, 150, 177, 192, 40, 5, 85, 96, 90, 20, 90], [1] * 7 + [3, 16, 10, 2, 26]
    asking = [Asking(*each) for each in zip(queries, lengths, tables, strict=True)]
    plan = Planner(page, stride=2, each=3, dtype=dtype).plan(asking)
    shared = {(b.size, tuple(b.shared.tolist())) for b in plan.bundles if b.shared is not None}
    # Padding repeats: four that go along with the first group, two of the second, and three ends of prompts.
    spines = [*first, 9, *second]
    assert shared == {
        ((2, 4, 1), tuple(2 * block for block in spines)), ((1, 3, 16), tuple(2 * block for block in first[:5]))
    }  # fmt: skip
    pages = [torch.randn(80, page, 2, 8, generator=group).to(dtype) for _ in range(2)]
    query = torch.randn(1, 6, sum(queries), 8, generator=group).to(dtype)
    own = torch.empty(sum(queries), 2, 8, dtype=dtype)
    attended = attend(plan, query, (own, own), (pages[0], pages[1]), None)
    begin = 0
    for asks in asking:
        k, v = (x[::2][list(asks.table)].flatten(0, 1)[: asks.keys].transpose(0, 1)[None].float() for x in pages)
        q = query[:, :, begin : begin + asks.queries].float()
        seen = torch.ones(asks.queries, asks.keys, dtype=torch.bool).tril(asks.keys - asks.queries)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
        near = attended[0, begin : begin + asks.queries].float()
        assert torch.allclose(near, expected, atol=1e-5 if dtype == torch.float32 else 0.02)
        begin += asks.queries


def test_what_decodes_in_the_pages_that_it_had_sees_its_new_key_as_if_planned_anew():
    common, planner, generator = list(range(6)), Planner(16, stride=1, each=2), torch.Generator().manual_seed(0)
    pages = [torch.randn(40, 16, 2, 8, generator=generator) for _ in range(2)]
    tables = [[*common, 10], [*common, 11], [*common[:4], 12], [20, 21]]
    for step in range(20):
        # The third ends after 3 steps; the first needs another page after 6.
        own = [[*tables[0], *([13] if step > 6 else [])], *tables[1:]]
        asking = [Asking(1, keys + step, own[i]) for i, keys in enumerate((105, 97, 65, 18)) if i != 2 or step < 3]
        if step > 12:
            asking = [a for a in asking if a.keys <= 16 * len(a.table)]
        query = torch.randn(1, 4, len(asking), 8, generator=generator)
        nothing = torch.empty(len(asking), 2, 8)
        grown, anew = (
            attend(p.plan(asking), query, (nothing, nothing), (pages[0], pages[1]), None)
            for p in (planner, Planner(16, stride=1, each=2))
        )
        assert torch.allclose(grown, anew, atol=1e-6)
