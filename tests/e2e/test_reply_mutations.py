"""A damaged reply of the model server is a `model_error` or is kept unchanged; tested through the env server."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from fakes import make_task
from faulty_engine import MUTATION, FaultyEngine
from plugin_runs import SAMPLING, config, served
from scripted_engine import by_turn
from troubles import SOLVES
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import retries
from harbortrainer.trials.outcome import Outcome

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MUTATIONS = 100
N_PARALLEL = 8


def tokens_of_reply(body: bytes) -> tuple[list, list]:
    """Return the token ids and log-probabilities of an accepted reply."""
    choice = json.loads(body)["choices"][0]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


def tokens_of_trace(trace: Trace) -> list[tuple[list, list]]:
    """Return the token ids and log-probabilities of each turn of a trace."""
    nodes = [node for node in trace.nodes if node.sampled]
    return [([i for i, own in zip(n.token_ids, n.mask, strict=True) if own], list(n.logprobs)) for n in nodes]


def assert_rejected_or_kept(trace: Trace, sent: list[bytes]) -> None:
    """Check that the trial is a `model_error` without reward, or has exactly the sent tokens."""
    outcome = Outcome(trace.info["harbor"]["outcome"])
    if outcome is Outcome.model_error:
        assert not trace.ok and not trace.rewards
    else:
        assert outcome.trains and trace.ok, trace.errors
        assert tokens_of_trace(trace) == [tokens_of_reply(body) for body in sent]


async def test_mutated_replies_are_rejected_or_kept(
    tmp_path: Path, tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=300)
    once = retries(TrialRetriedError, 0).model_dump()
    harness = {"agent_kwargs": {"model_retries": 0}, "n_parallel_envs": N_PARALLEL, "keep_trials": "none"}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries=once)
    (task,) = load_taskset(resolve_env_config(env).taskset)
    data = task.data.model_dump(mode="json")
    names = [f"{MUTATION}{seed}" for seed in range(MUTATIONS)]
    with FaultyEngine(tokenizer_dir, by_turn(SOLVES)) as engine:
        async with served(env, workers=2) as server:
            runs = [server.run(engine.llm_client(name), engine.model, SAMPLING, data) for name in names]
            episodes = await asyncio.gather(*runs)
            # Read before verifiers' server is interrupted; the test does not check its shutdown.
            output = "".join(capfd.readouterr())
    traces = [trace for episode in episodes for trace in episode.traces]
    for name, trace in zip(names, traces, strict=True):
        assert_rejected_or_kept(trace, engine.sent[name])  # ty: ignore[invalid-argument-type]
    assert "Traceback" not in output
    print(Counter(trace.info["harbor"]["outcome"] for trace in traces))
