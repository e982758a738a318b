"""The same scripted episode through both captures: the same tokens, masks and log-probabilities, or no trace at all."""

from pathlib import Path
from typing import Any

import pytest
from fakes import DONE, SOLVED, keys, make_task
from plugin_runs import config, play_one
from scripted_engine import Answer, Script, ScriptedEngine, by_turn
from verifiers.v1.trace import Trace

pytestmark = pytest.mark.e2e

ANSWER = keys("mkdir -p /app && touch /app/answer", duration=1.0)
Samples = list[tuple[list[int], list[bool], list[float]]]


def samples(trace: Trace) -> Samples:
    """What the trainer sees: one sample a branch."""
    return sorted((b.token_ids, b.sampled_mask, b.logprobs) for b in trace.branches)


def sampled_once(trace: Trace) -> list[tuple[list[int], list[float]]]:
    """Every sampled answer of the graph, each once, with its log-probabilities."""
    nodes = [node for node in trace.nodes if node.sampled]
    return sorted(([t for t, m in zip(n.token_ids, n.mask, strict=True) if m], n.logprobs) for n in nodes)


async def through(capture: str, tmp_path: Path, engine: ScriptedEngine, **harness: Any) -> Trace:
    """One episode of the task in `tmp_path` through one capture."""
    if capture == "rollout_details":
        harness |= {"capture": capture, "vllm_base_url": f"{engine.url}/v1"}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness)
    env["agent"]["retries"] = {"max_retries": 0, "rules": []} if _has_rules() else {"max_retries": 0}
    return await play_one(env, engine)


async def both(tmp_path: Path, tokenizer: Path, script: Script, **harness: Any) -> tuple[Trace, Trace]:
    """The same episode through both captures."""
    for _ in range(5):
        with ScriptedEngine(tokenizer, script) as engine:
            intercepted = await through("interception", tmp_path, engine, **harness)
            seen = [sample.prompt_ids for sample in engine.samples]
            direct = await through("rollout_details", tmp_path, engine, **harness)
        # A terminal is not a clock: when its output came a moment later, these were two different episodes.
        if [sample.prompt_ids for sample in engine.samples] == seen * 2:
            break
    assert intercepted.ok, intercepted.errors
    assert direct.ok, direct.errors
    assert intercepted.info["harbor"]["outcome"] == direct.info["harbor"]["outcome"]
    assert intercepted.reward == direct.reward
    return intercepted, direct


def assert_equal(intercepted: Trace, direct: Trace, *, branches: int) -> None:
    assert samples(direct) == samples(intercepted)
    assert sampled_once(direct) == sampled_once(intercepted)
    assert len(direct.branches) == branches


async def test_plain(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await both(tmp_path, tokenizer_dir, by_turn([ANSWER, DONE, DONE]))
    assert_equal(*traces, branches=1)


async def test_a_cut_answer(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([Answer("I would say that", cut=True), ANSWER, DONE, DONE])
    traces = await both(tmp_path, tokenizer_dir, script)
    assert traces[0].num_turns == 4, "the cut answer trains too"
    assert_equal(*traces, branches=1)


async def test_a_malformed_answer(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await both(tmp_path, tokenizer_dir, by_turn(["no JSON at all", ANSWER, DONE, DONE]))
    assert traces[0].info["harbor"]["parse_errors"] == 1
    assert_equal(*traces, branches=1)


async def test_dropped_reasoning(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([f"<think>number {n}</think>{text}" for n, text in enumerate([ANSWER, DONE, DONE])])
    traces = await both(tmp_path, tokenizer_dir, script)
    assert_equal(*traces, branches=3)


async def test_kept_reasoning(tmp_path: Path, thinking_tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([f"<think>number {n}</think>{text}" for n, text in enumerate([ANSWER, DONE, DONE])])
    traces = await both(tmp_path, thinking_tokenizer_dir, script)
    assert_equal(*traces, branches=1)


def summarizing(prompt: str) -> Answer:
    """Answers of an agent whose context is summed up after its first turn."""
    asked = prompt.rpartition("<|im_start|>user")[2]
    if any(phrase in asked for phrase in ("about to hand off", "picking up work", "The next agent has a few")):
        return Answer("I did a lot and know everything.")
    if "Here are the answers" in prompt:
        return Answer(DONE)
    return by_turn([ANSWER, keys("echo " + "x" * 900, duration=0.3), DONE])(prompt)


SUMS_UP = {
    "enable_summarize": True,
    "proactive_summarization_threshold": 8200,
    "model_info": {
        "max_input_tokens": 9000,
        "max_output_tokens": 512,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    },
}


async def test_summarization(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await both(tmp_path, tokenizer_dir, summarizing, agent_kwargs=SUMS_UP, max_turns=6)
    assert len(traces[0].branches) > 1, "a summary was made"
    assert_equal(*traces, branches=len(traces[0].branches))


async def test_stock_terminus_records_a_summary_otherwise_and_fails_closed(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    await _fails_closed(tmp_path, tokenizer_dir, summarizing, "terminus-2", kwargs=SUMS_UP)


async def test_multi_step(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "steps", steps={"one": SOLVED, "two": SOLVED})
    traces = await both(tmp_path, tokenizer_dir, by_turn([ANSWER, DONE, DONE]))
    assert_equal(*traces, branches=2)


@pytest.mark.parametrize("forget", ["ids", "logprobs", "logprob", "number"])
@pytest.mark.parametrize("agent", ["ours", "terminus-2"])
async def test_a_missing_token_id_or_logprob_fails_the_trial(
    tmp_path: Path, tokenizer_dir: Path, forget: str, agent: str
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([ANSWER, Answer(DONE, forget=forget), DONE])
    await _fails_closed(tmp_path, tokenizer_dir, script, agent)


async def test_stock_terminus_agrees_where_it_records_everything(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([ANSWER, DONE, DONE])
    with ScriptedEngine(tokenizer_dir, script) as engine:
        intercepted = await through("interception", tmp_path, engine)
        stock = await through("rollout_details", tmp_path, engine, agent="terminus-2", agent_kwargs=STOCK)
    assert stock.ok, stock.errors
    assert sampled_once(stock) == sampled_once(intercepted)


async def test_stock_terminus_loses_cut_answers_and_fails_closed(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([Answer("I would say that", cut=True), ANSWER, DONE, DONE])
    await _fails_closed(tmp_path, tokenizer_dir, script, "terminus-2")


async def test_a_server_that_refuses_return_token_ids_fails_the_trial(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([ANSWER, DONE, DONE])
    await _fails_closed(tmp_path, tokenizer_dir, script, "terminus-2", refuses=("return_token_ids",))


STOCK = {"record_terminal_session": False}


async def _fails_closed(
    tmp_path: Path,
    tokenizer: Path,
    script: Script,
    agent: str,
    *,
    refuses: tuple[str, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> None:
    stock = {} if agent == "ours" else {"agent": agent, "agent_kwargs": STOCK | (kwargs or {})}
    with ScriptedEngine(tokenizer, script, refuses=refuses) as engine:
        trace = await through("rollout_details", tmp_path, engine, **stock)
    assert not trace.ok
    assert trace.info["harbor"]["outcome"] == "model_error"
    assert trace.errors[-1].message.startswith("model_error:")
    assert trace.nodes == []


def _has_rules() -> bool:
    from verifiers.v1.configs.retries import RetryConfig

    return "rules" in RetryConfig.model_fields
