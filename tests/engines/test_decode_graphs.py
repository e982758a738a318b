"""Decoding by graphs on a GPU that is pretended: the same tokens and log-probabilities, from memory alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from pretend_gpu import pretend_gpu
from pretend_graphs import CaptureError, Graph
from sampler_setup import LORA, Reference, agrees, generate, logprobs_of, random_adapter, random_prompt
from tiny_model import build_tiny_model
from torch import nn

from harbortrainer.engines import decode_graphs
from harbortrainer.engines.batching_internals import PagedAttentionArgs
from harbortrainer.engines.decode_graphs import DecodeGraph, DecodeGraphs, Size, size_of
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner
from harbortrainer.engines.ragged_plan import Asking, Planner
from harbortrainer.engines.waiting_operations import Waits

PROMPTS = [random_prompt(length, seed=length) for length in (3, 40, 90, 17, 64)]
LENGTHS = [30, 6, 18, 25, 12]
DRAWS: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def graphs_of(sampler: Sampler) -> DecodeGraphs:
    assert sampler._replies is not None
    processor = sampler._replies.engine._manager.batch_processor
    assert processor is not None
    graphs = cast("SeededRunner", processor.model_runner).graphs
    assert graphs is not None
    return graphs


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "COUNTS", ())


def ask(sampler: Sampler) -> list[dict]:
    """Requests of different lengths and ways to draw, at once: they end one by one. Then one alone, of a size that has
    been there, that draws in another way."""

    def one(i: int) -> dict:
        return generate(sampler.url, PROMPTS[i], seed=i, max_tokens=LENGTHS[i], ignore_eos=True, **DRAWS[i])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(one, range(len(PROMPTS))))
    return [*together, generate(sampler.url, PROMPTS[1], seed=9, max_tokens=8, top_k=2, ignore_eos=True)]


def played(folder, adapters: list[dict[str, torch.Tensor]]) -> tuple[list[list[dict]], DecodeGraphs]:
    """What each of several policies says, with hand-overs between them."""
    said = []
    with pretend_gpu(), Sampler(folder, max_model_len=256, dtype="float32") as sampler:
        for version, adapter in enumerate([None, *adapters]):
            if adapter is not None:
                sampler.load_adapter({k: t.cuda() for k, t in adapter.items()}, version, config=LORA)
            said.append(ask(sampler))
        graphs = graphs_of(sampler)
        assert sampler.stats()["graph_passes"] == graphs.played
        return said, graphs


def test_a_graph_says_what_each_operation_said(folder, monkeypatch):
    adapters = [random_adapter(folder, seed) for seed in (1, 2, 3)]
    by_graphs, graphs = played(folder, adapters)
    assert not graphs.refused
    without_graphs(monkeypatch)
    one_by_one, none = played(folder, adapters)
    assert (graphs.played > 60, none.played) == (True, 0)
    for said, expected in zip(by_graphs, one_by_one, strict=True):
        for one, other in zip(said, expected, strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5)
    for version, adapter in enumerate([None, *adapters]):
        assert agrees(by_graphs[version][0], Reference(folder, adapter), PROMPTS[0])


@pytest.mark.parametrize(
    ("asking", "size"),
    [
        ([Asking(1, 1, [0])], Size(1, 4)),
        ([Asking(1, 64, [0] * 4)] * 2, Size(4, 4)),
        ([Asking(1, 65, [0] * 5)] + [Asking(1, 1, [0])] * 16, Size(64, 8)),
        ([Asking(1, 16 * 64, [0] * 64)] * 64, Size(64, 64)),
        ([Asking(1, 16 * 64 + 1, [0] * 65)] * 64, None),
        ([Asking(1, 16 * 4096, [0] * 4096)], Size(1, 4096)),
        ([Asking(1, 5, [0])] * 65, None),
        ([Asking(1, 5, [0]), Asking(2, 5, [0])], None),
    ],
)
def test_a_pass_is_padded_to_one_of_a_few_sizes(asking, size):
    assert size_of(asking, 16) == size


def pass_of(writes: list[int]) -> PagedAttentionArgs:
    """What transformers gives a pass of requests that decode, as far as a graph takes it."""
    count = len(writes)
    numbers = torch.arange(count, dtype=torch.int32)
    return cast(
        "PagedAttentionArgs",
        {
            "input_ids": numbers[None] + 5,
            "position_ids": numbers[None] + 50,
            "logits_processor_args": numbers.expand(5, -1) + 7,
            "write_index": [torch.tensor(writes)],
        },
    )


def test_what_padding_computes_is_written_where_nobody_reads():
    """What has ended would write on into its page, which may be another's by then."""
    graph, planner = DecodeGraph(Size(4, 4), pass_of([1]), unread=99), Planner(16, 10, 2)
    graph.fill(pass_of([3, 4, 5]), [Asking(1, 20, [1, 2, 8]), Asking(1, 16, [3]), Asking(1, 1, [4])], 16)
    graph.fill(pass_of([6, 7]), [Asking(1, 21, [1, 2, 8]), Asking(1, 17, [3, 5])], 16)
    batch = graph.batch(pass_of([1]), planner)
    (bundle,) = batch["ragged_plan"].bundles
    assert batch["write_index"][0].tolist() == [6, 7, 99, 99]
    assert batch["input_ids"][0, :2].tolist() == [5, 6]
    assert batch["position_ids"][0, :2].tolist() == [50, 51]
    assert batch["logits_processor_args"][:, :2].tolist() == [[7, 8]] * 5
    assert batch["logits_indices"].tolist() == [0, 1, 2, 3]
    assert bundle.own.view(4, 4).tolist() == [[10, 20, 20, 20]] + [[30, 50, 50, 50]] * 3
    assert (bundle.real == 0).sum((1, 2, 3)).tolist() == [21, 17, 17, 17]


class TestWhatCannotBeCaptured:
    def forward(self, monkeypatch, extra: Callable[[torch.Tensor], object]) -> None:
        plain = nn.Embedding.forward
        monkeypatch.setattr(nn.Embedding, "forward", lambda self, ids: (extra(ids), plain(self, ids))[1])

    @pytest.mark.parametrize(
        "extra", [lambda ids: ids.max().item(), lambda ids: ids[ids > 3], lambda ids: bool(ids.sum() > 0)]
    )
    def test_a_model_that_waits_for_a_number_has_none(self, folder, monkeypatch, caplog, extra):
        self.forward(monkeypatch, extra)
        (said,), graphs = played(folder, [])
        assert "waits for a number" in graphs.refused
        assert len([r for r in caplog.records if r.message.endswith(f"without CUDA graphs: {graphs.refused}")]) == 1
        assert graphs.played == 0
        assert agrees(said[0], Reference(folder), PROMPTS[0])

    def test_a_capture_that_fails_is_told_once(self, folder, monkeypatch, caplog):
        self.forward(monkeypatch, lambda ids: torch.tensor([1.0], device=ids.device))
        (said,), graphs = played(folder, [])
        assert "not permitted when stream is capturing" in graphs.refused
        assert len([r for r in caplog.records if "without CUDA graphs" in r.message]) == 1
        assert agrees(said[0], Reference(folder), PROMPTS[0])

    def test_what_waits_is_named(self):
        x = torch.arange(6)
        waiting = (
            lambda: x.max().item(), lambda: bool(x.sum() > 0), lambda: x[x > 3], lambda: x.nonzero(),
            lambda: torch.where(x > 3), lambda: x.masked_select(x > 3), lambda: x.unique(), lambda: torch.equal(x, x),
            lambda: torch.repeat_interleave(x, x), lambda: x.clone().index_put_((x > 3,), x[:2]),
            lambda: torch.where(x > 3, x, 0), lambda: torch.where(x > 3, 0, x),
        )  # fmt: skip
        going_on = (
            lambda: x[x[:3]], lambda: x[2:4], lambda: torch.where(x > 3, x, x), lambda: x.index_select(0, x),
            lambda: x.clone().index_put_((x[:2],), x[2:4]), lambda: x.clone().masked_fill_(x > 3, 0),
            lambda: torch.repeat_interleave(x, 2),
        )  # fmt: skip
        for compute, waits in [*((c, True) for c in waiting), *((c, False) for c in going_on)]:
            with torch.inference_mode(), Waits() as watch:
                compute()
            assert bool(watch.named) == waits, watch.named


class TestThePretendedGraph:
    def captured(self, compute: Callable[[], object]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            compute()
        return cast("Graph", graph)

    def test_computes_again_what_lies_in_memory_and_keeps_pythons_numbers(self):
        with pretend_gpu(), torch.inference_mode():
            given, out, factor = torch.tensor([1.0, 2.0], device="cuda"), torch.zeros(2, device="cuda"), 3.0
            graph = self.captured(lambda: out.copy_((given * factor).view(1, 2).sum(0)))
            torch.cuda.synchronize()
            assert out.tolist() == [0.0, 0.0]
            factor = 5.0
            given.add_(1)
            torch.cuda.synchronize()
            graph.replay()
            assert out.tolist() == [6.0, 9.0]

    @pytest.mark.parametrize(
        "asked",
        [lambda x: x.tolist(), lambda x: x.cpu(), lambda x: torch.ones(2).cuda(), lambda x: x.copy_(torch.ones(2))],
    )
    def test_refuses_what_the_cpu_tells_or_is_told(self, asked):
        with pretend_gpu():
            given = torch.tensor([1.0, 2.0], device="cuda")
            with pytest.raises(CaptureError):
                self.captured(lambda: asked(given))
