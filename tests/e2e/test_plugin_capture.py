"""Both captures give equal tokens, masks and log-probabilities for a scripted episode, or no trace."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from fakes import DONE, SOLVED, keys, make_task
from plugin_runs import config, play, play_one, salted_sampling
from renderers import CustomRendererConfig, Qwen3RendererConfig, RendererConfig
from renderers.base import load_tokenizer
from scripted_engine import Answer, Script, ScriptedEngine, by_turn
from verifiers.v1.trace import Trace, WireTrace

from harbortrainer.engines.local.rollouts.trace_samples import trace_samples
from harbortrainer.environment.verifiers_compat import SamplingConfig
from harbortrainer.runs.trace_transcript import as_list
from tiny_policy.prompts import episode
from tiny_policy.tokenizer import train_tokenizer

pytestmark = pytest.mark.e2e

APPENDING = "harbortrainer.environment.appending_template.AppendingTemplate"
ANSWER = keys("mkdir -p /app && touch /app/answer", duration=1.0)
Samples = list[tuple[list[int], list[bool], list[float]]]


def samples(trace: Trace) -> Samples:
    """Return what is trained on: token ids, mask and log-probabilities of each branch."""
    return sorted((as_list(b.token_ids), as_list(b.sampled_mask), as_list(b.logprobs)) for b in trace.branches)


def sampled_answers(trace: Trace) -> list[tuple[list[int], list[float]]]:
    """Return token ids and log-probabilities of each sampled answer. Branches that share an answer count it once."""
    nodes = [node for node in trace.nodes if node.sampled]
    return sorted(([t for t, m in zip(n.token_ids, n.mask, strict=True) if m], as_list(n.logprobs)) for n in nodes)


async def run_episode(capture: str, tmp_path: Path, engine: ScriptedEngine, **harness: Any) -> Trace:
    """Run one episode of the task in `tmp_path` with the given capture."""
    if capture == "rollout_details":
        harness |= {"capture": capture, "vllm_base_url": f"{engine.url}/v1"}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness)
    env["agent"]["retries"] = {"max_retries": 0, "rules": []} if _has_rules() else {"max_retries": 0}
    return await play_one(env, engine)


async def run_both_captures(
    tmp_path: Path,
    tokenizer: Path,
    script: Script,
    chat_format: RendererConfig | None = None,
    *,
    direct_harness: dict[str, Any] | None = None,
    **harness: Any,
) -> tuple[Trace, Trace]:
    """Run the same episode with both captures; `direct_harness` has harness keys for `rollout_details` only."""
    for _ in range(5):
        with ScriptedEngine(tokenizer, script, format=chat_format) as engine:
            intercepted = await run_episode("interception", tmp_path, engine, **harness)
            prompts = [sample.prompt_ids for sample in engine.samples]
            direct = await run_episode("rollout_details", tmp_path, engine, **harness, **(direct_harness or {}))
        # Terminal output can arrive later in one episode; both run again if their prompts differ.
        if [sample.prompt_ids for sample in engine.samples] == prompts * 2:
            break
    assert intercepted.ok, intercepted.errors
    assert direct.ok, direct.errors
    assert intercepted.info["harbor"]["outcome"] == direct.info["harbor"]["outcome"]
    assert intercepted.reward == direct.reward
    return intercepted, direct


def assert_equal(intercepted: Trace, direct: Trace, *, branches: int) -> None:
    assert samples(direct) == samples(intercepted)
    assert sampled_answers(direct) == sampled_answers(intercepted)
    assert len(direct.branches) == branches


async def test_plain_episode_is_equal_in_both_captures(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await run_both_captures(tmp_path, tokenizer_dir, by_turn([ANSWER, DONE, DONE]))
    assert_equal(*traces, branches=1)


async def test_direct_calls_carry_cache_salt(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, by_turn([ANSWER, DONE, DONE])) as engine:
        harness = {"capture": "rollout_details", "vllm_base_url": f"{engine.url}/v1"}
        env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness)
        (episode,) = await play(env, engine, sampling=salted_sampling("3"))
    assert episode.ok, episode.errors
    assert [(body["cache_salt"], body["top_k"]) for body in engine.requests] == [("3", 7)] * 3


@pytest.mark.parametrize(
    ("processed", "temperature", "outcome"),
    [(True, 0.6, "completed"), (False, 0.6, "model_error"), (False, 1.0, "completed")],
)
async def test_logprobs_of_another_distribution_do_not_train(
    tmp_path: Path, tokenizer_dir: Path, processed: bool, temperature: float, outcome: str
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    sampling = SamplingConfig(temperature=temperature, max_tokens=512)
    with ScriptedEngine(tokenizer_dir, by_turn([ANSWER, DONE, DONE]), processed_logprobs=processed) as engine:
        harness = {"capture": "rollout_details", "vllm_base_url": f"{engine.url}/v1"}
        env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries={"max_retries": 0})
        traces = [result.traces[0] for result in await play(env, engine, times=2, sampling=sampling)]
    assert [trace.info["harbor"]["outcome"] for trace in traces] == [outcome] * 2
    assert engine.logprob_probes == (temperature != 1), "one probe per server, and only if the temperature is not 1"
    for trace in traces:
        assert trace.ok == (outcome == "completed") and bool(trace.nodes) == trace.ok
        assert trace.ok or "with temperature 0.6: start vLLM with --logprobs-mode" in trace.errors[-1].message


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with Qwen3's special tokens and chat template."""
    folder = tmp_path_factory.mktemp("qwen3")
    train_tokenizer([episode("Create the file /app/answer.", ["touch /app/answer"])]).save_pretrained(folder)
    return folder


async def test_echo_predicts_only_terminal_output(tmp_path: Path, qwen3: Path) -> None:
    """Echo trains on the agent's messages after the first answer; template, answers and instruction are excluded."""
    make_task(tmp_path / "tasks" / "answer")
    chat_format = Qwen3RendererConfig(thinking_retention="all")
    script = by_turn([keys("echo it is $((6 * 7)); touch /app/answer", duration=1.0), "no JSON at all", DONE, DONE])
    traces = await run_both_captures(tmp_path, qwen3, script, chat_format)
    assert_equal(*traces, branches=1)
    tokenizer = load_tokenizer(str(qwen3))
    terminal_outputs = [str(node.message.content) for node in traces[0].nodes if node.message.role == "user"][1:]
    assert len(terminal_outputs) == 3
    assert "it is 42" in terminal_outputs[0]
    for trace in traces:
        wire_trace = WireTrace.model_validate(trace.model_dump(mode="json"))
        (sample,) = trace_samples(wire_trace, {}, 1.0, {"user": 0.1}, task="", trial="")
        runs = [list(run) for chosen, run in groupby(enumerate(sample.ce_weights or ()), lambda x: x[1] > 0) if chosen]
        assert [tokenizer.decode([sample.token_ids[i] for i, _ in run]) for run in runs] == terminal_outputs
        assert {weight for run in runs for _, weight in run} == {0.1}


async def test_truncated_answer_is_equal_in_both_captures(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([Answer("I would say that", cut=True), ANSWER, DONE, DONE])
    traces = await run_both_captures(tmp_path, tokenizer_dir, script)
    assert traces[0].num_turns == 4, "the truncated answer is trained on too"
    assert_equal(*traces, branches=1)


async def test_malformed_answer_is_equal_in_both_captures(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await run_both_captures(tmp_path, tokenizer_dir, by_turn(["no JSON at all", ANSWER, DONE, DONE]))
    assert traces[0].info["harbor"]["parse_errors"] == 1
    assert_equal(*traces, branches=1)


async def test_trimming_template_gives_one_branch_with_appending_template(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Without it, the trimmed history differs from the sampled tokens, so each turn is its own branch."""
    make_task(tmp_path / "tasks" / "answer")
    tokenizer = load_tokenizer(str(tokenizer_dir))
    template = tokenizer.chat_template
    assert template.count("message.content") == 1
    tokenizer.chat_template = template.replace("message.content", "(message.content | trim)")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    script = by_turn([f"{text}\n\n" for text in (ANSWER, DONE, DONE)])
    for chat_format, branches in ((None, 3), (CustomRendererConfig(import_path=APPENDING), 1)):
        with ScriptedEngine(tmp_path / "tokenizer", script, format=chat_format) as engine:
            trace = await run_episode("interception", tmp_path, engine)
        assert trace.ok, trace.errors
        assert (len(trace.branches), trace.num_turns, trace.reward) == (branches, 3, 1.0)
        assert len(sampled_answers(trace)) == 3


async def test_dropped_reasoning_gives_one_branch_per_turn(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([f"<think>number {n}</think>{text}" for n, text in enumerate([ANSWER, DONE, DONE])])
    traces = await run_both_captures(tmp_path, tokenizer_dir, script)
    assert_equal(*traces, branches=3)


async def test_kept_reasoning_gives_one_branch(tmp_path: Path, thinking_tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([f"<think>number {n}</think>{text}" for n, text in enumerate([ANSWER, DONE, DONE])])
    traces = await run_both_captures(tmp_path, thinking_tokenizer_dir, script)
    assert_equal(*traces, branches=1)


def summarizing(prompt: str) -> Answer:
    """Answer as the model of an agent that summarizes its context after the first turn."""
    question = prompt.rpartition("<|im_start|>user")[2]
    if any(phrase in question for phrase in ("about to hand off", "picking up work", "The next agent has a few")):
        return Answer("I did a lot and know everything.")
    if "Here are the answers" in prompt:
        return Answer(DONE)
    return by_turn([ANSWER, keys("echo " + "x" * 900, duration=0.3), DONE])(prompt)


SUMMARIZE_KWARGS = {
    "enable_summarize": True,
    "proactive_summarization_threshold": 8200,
    "model_info": {
        "max_input_tokens": 9000,
        "max_output_tokens": 512,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    },
}


async def test_summarization_is_equal_in_both_captures(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    traces = await run_both_captures(tmp_path, tokenizer_dir, summarizing, agent_kwargs=SUMMARIZE_KWARGS, max_turns=6)
    assert len(traces[0].branches) > 1, "a summary was made"
    assert_equal(*traces, branches=len(traces[0].branches))


async def test_harbor_terminus_that_summarizes_is_model_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    await _assert_model_error(tmp_path, tokenizer_dir, summarizing, "terminus-2", kwargs=SUMMARIZE_KWARGS)


async def test_multi_step_trial_is_equal_in_both_captures(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "steps", steps={"one": SOLVED, "two": SOLVED})
    traces = await run_both_captures(tmp_path, tokenizer_dir, by_turn([ANSWER, DONE, DONE]))
    assert_equal(*traces, branches=2)


@pytest.mark.parametrize("missing", ["ids", "logprobs", "logprob", "number"])
@pytest.mark.parametrize("agent", ["ours", "terminus-2"])
async def test_missing_token_id_or_logprob_fails_trial(
    tmp_path: Path, tokenizer_dir: Path, missing: str, agent: str
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([ANSWER, Answer(DONE, defect=missing), DONE])
    await _assert_model_error(tmp_path, tokenizer_dir, script, agent)


async def test_harbor_terminus_is_equal_if_it_records_every_call(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harbor = {"agent": "terminus-2", "agent_kwargs": HARBOR_KWARGS}
    traces = await run_both_captures(tmp_path, tokenizer_dir, by_turn([ANSWER, DONE, DONE]), direct_harness=harbor)
    assert_equal(*traces, branches=1)


async def test_harbor_terminus_with_truncated_answer_is_model_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([Answer("I would say that", cut=True), ANSWER, DONE, DONE])
    await _assert_model_error(tmp_path, tokenizer_dir, script, "terminus-2")


async def test_server_refusing_return_token_ids_fails_trial(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    script = by_turn([ANSWER, DONE, DONE])
    await _assert_model_error(tmp_path, tokenizer_dir, script, "terminus-2", refuses=("return_token_ids",))


HARBOR_KWARGS = {"record_terminal_session": False}


async def _assert_model_error(
    tmp_path: Path,
    tokenizer: Path,
    script: Script,
    agent: str,
    *,
    refuses: tuple[str, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> None:
    harness = {} if agent == "ours" else {"agent": agent, "agent_kwargs": HARBOR_KWARGS | (kwargs or {})}
    with ScriptedEngine(tokenizer, script, refused_keys=refuses) as engine:
        trace = await run_episode("rollout_details", tmp_path, engine, **harness)
    assert not trace.ok
    assert trace.info["harbor"]["outcome"] == "model_error"
    assert trace.errors[-1].message.startswith("model_error:")
    assert trace.nodes == []


def _has_rules() -> bool:
    from verifiers.v1.configs.retries import RetryConfig

    return "rules" in RetryConfig.model_fields


@pytest.mark.parametrize(
    "harness", [{}, {"capture": "rollout_details"}, {"agent": "terminus-2"}, {"agent": "inside_agents:OneCallAgent"}]
)
async def test_overlong_first_prompt_is_agent_error_without_retry(
    tmp_path: Path, tokenizer_dir: Path, harness: dict
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, by_turn([DONE]), max_model_len=10) as engine:
        own = harness | ({"vllm_base_url": f"{engine.url}/v1"} if "capture" in harness else {})
        (episode,) = await play(config(tmp_path / "tasks", tmp_path / "trials", harness=own), engine)
    (trace,) = episode.traces
    record = trace.info["harbor"]
    assert (record["outcome"], record["reward"], engine.samples) == ("agent_error", None, [])
    assert record["error"]["type"] == "PromptTooLongError"
    assert "raise seq_len" in record["error"]["message"]
    assert not trace.ok and not trace.rewards
    assert len(list((tmp_path / "trials").iterdir())) == 1, "the trial was retried"
