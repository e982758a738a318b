"""Prime-RL's orchestrator, env server and trainer on a CPU, with our plugin and sampler, and real trials."""

import json
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from batch_files import Sequence, episodes, last_batch, sequences
from conftest import MAX_LENGTH, PrimeRL, free_port, trainer_config
from fakes import make_task
from metrics_table import documented_metrics, matches
from orchestrator_endpoints import OrchestratorSampler

from harbortrainer.engines.local.sampler import Completion, Sampler
from harbortrainer.engines.local.sampler.requests import GenerateRequest
from harbortrainer.environment.request_check import RUN_KEY_FILE, RUN_KEY_FILE_VARIABLE, ModelServer, RunKey

pytestmark = pytest.mark.prime_rl

STEPS, BATCH, GROUP = 5, 8, 4
# A random policy solves nothing. A random reward gives its groups nonzero advantages.
RANDOM_REWARD = "echo $((RANDOM % 5)) > /logs/verifier/reward.txt"
OFTEN_NO_REWARD = f"[ $((RANDOM % 2)) = 0 ] || {RANDOM_REWARD}"
"""Verifier of trials of which a quarter fails: a trial without a reward is retried once."""
CURRICULUM = {"sampler": {"type": "difficulty_pool"}, "gates": {"signal": {}}}


def write_configs(folder: Path, policy: Path, url: str) -> tuple[Path, Path]:
    """Write the config files of the orchestrator and the env server as `rl` does; return their paths."""
    harness = {"environment_type": "local", "trials_dir": str(folder / "trials"), "n_parallel_envs": 3}
    env = {
        "taskset": {"id": "harbor_env", "tasks_dir": str(folder / "tasks")},
        "agent": {"max_turns": 3, "harness": harness},
    }
    serve = {"address": f"tcp://127.0.0.1:{free_port()}", "pool": {"type": "static", "num_workers": 2}}
    orchestrator: dict[str, Any] = {
        "max_steps": STEPS,
        "seq_len": MAX_LENGTH,
        "batch_size": BATCH,
        "group_size": GROUP,
        "output_dir": str(folder / "outputs"),
        "model": {"name": str(policy), "client": {"base_url": f"{url}/v1"}, "lora": {"name": "policy"}},
        "renderer": {"name": "qwen3", "thinking_retention": "all"},
        "train": {
            "source": [{"name": "harbor", "env": env, "serve": serve, "curriculum": CURRICULUM}],
            "sampling": {"max_completion_tokens": 40},
        },
        "rollout_transport": {"type": "filesystem"},
        "weight_broadcast": {"type": "filesystem"},
        "concurrency": {"initial_inflight": BATCH, "max_inflight": BATCH},
    }
    paths = folder / "orchestrator.json", folder / "env_server.json"
    paths[0].write_text(json.dumps(orchestrator))
    paths[1].write_text(json.dumps({"env": env, "serve": serve, "output_dir": str(folder / "outputs")}))
    return paths


def tail(log: Path) -> str:
    """Return the last 4000 characters of a log."""
    return log.read_text(errors="replace")[-4000:]


def run_orchestrator(prime_rl: PrimeRL, folder: Path, policy: Path, url: str) -> None:
    """Run the programs, with a run key as from our launcher, until orchestrator and trainer exit by themselves."""
    orchestrator_config, server_config = write_configs(folder, policy, url)
    outputs = folder / "outputs"
    outputs.mkdir()
    optim = {"lr": 1e-2}
    config = trainer_config(outputs, policy, steps=STEPS, seq_len=MAX_LENGTH, optim=optim)
    RunKey.create(folder / RUN_KEY_FILE, [ModelServer(base_url=f"{url}/v1", api_key_var="VLLM_API_KEY")])
    key = {RUN_KEY_FILE_VARIABLE: str(folder / RUN_KEY_FILE)}
    server = prime_rl.start("env-server", server_config, folder / "env_server.log", **key)
    orchestrator = prime_rl.start("orchestrator", orchestrator_config, folder / "orchestrator.log", **key)
    trainer = prime_rl.start("trainer", config, folder / "trainer.log")
    logs = [folder / f"{name}.log" for name in ("orchestrator", "env_server", "trainer")]
    try:
        codes = [process.wait(timeout=900) for process in (orchestrator, trainer)]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(["timeout:", *map(tail, logs)]))
    finally:
        for process in (trainer, orchestrator, server):
            process.terminate()
            process.wait(30)
    assert codes == [0, 0], "\n".join(map(tail, logs))


def sampled_spans(sequence: Sequence) -> list[tuple[int, int]]:
    """Return the start and end of every contiguous span of trained tokens."""
    spans, start = [], None
    for i, trained in enumerate([*sequence.mask, False]):
        if trained and start is None:
            start = i
        elif not trained and start is not None:
            spans.append((start, i))
            start = None
    return spans


def sampled_completion(completions: list[Completion], sequence: Sequence, start: int, end: int) -> Completion:
    """Return the sampler's completion for one span of a sample."""
    token_ids = tuple(sequence.token_ids[start:end])
    found = next((c for c in completions if c.prompt_len == start and c.token_ids == token_ids), None)
    assert found is not None, "a trained token that was never sampled"
    return found


def record_cache_salts(sampler: Sampler) -> list[object]:
    """Return a list that collects each request's cache salt, or "misplaced" if the sampling parameters contain it."""
    assert sampler._handler is not None
    generate, salts = sampler._handler.generate, []

    async def recording(request: GenerateRequest, session: str) -> dict[str, object]:
        extra_parameters = request.sampling_params.model_extra or {}
        salts.append("misplaced" if "cache_salt" in extra_parameters else (request.model_extra or {}).get("cache_salt"))
        return await generate(request, session)

    sampler._handler.generate = recording
    return salts


def check_documented_metrics(metrics_file: Path) -> None:
    """Check that Prime-RL writes each step metric that docs/metrics.md lists for both engines or its trainer."""
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    keys = {key for row in rows for key in row}
    names = [name for name in documented_metrics("both", "trainer") if not name.startswith("eval/")]
    assert [name for name in names if not any(matches(name, key) for key in keys)] == []
    shares = [key for key in keys if "/all/agent/metrics/outcome_" in key and key.startswith("train/agg/")]
    assert any(sum(row.get(key, 0.0) for key in shares if key.endswith("/mean")) == pytest.approx(1.0) for row in rows)


def check_groups(outputs: Path) -> int:
    """Check that nothing is played in place of a failed trial, and that the others train by their own mean reward.

    Returns:
        The number of trained groups with a failed trial.
    """
    trained = {
        tuple(sequence.token_ids): max(sequence.advantages, key=abs)
        for step in range(1, STEPS + 1)
        for sequence in sequences(outputs, step)
    }
    groups = defaultdict(list)
    for episode in episodes(outputs, "all"):
        groups[episode["group"]["id"]] += [episode]
    smaller = 0
    for group in groups.values():
        assert len(group) <= GROUP
        good = [episode["traces"][0] for episode in group if episode["ok"]]
        rewards = [trace["info"]["harbor"]["reward"] for trace in good]
        tokens = [tuple(token for node in trace["nodes"] for token in node["token_ids"]) for trace in good]
        for reward, ids in zip(rewards, tokens, strict=True):
            assert ids not in trained or trained[ids] == pytest.approx(reward - fmean(rewards))
        smaller += len(good) < len(group) and any(ids in trained for ids in tokens)
    return smaller


def test_steps_train_on_exactly_the_sampled_tokens(prime_rl: PrimeRL, policy: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name, test=OFTEN_NO_REWARD, extra=f"# {name}")
    sampled: list[Completion] = []
    with OrchestratorSampler(policy, device="cpu", max_model_len=MAX_LENGTH) as sampler:
        add = sampler.completion_log.add
        sampler.completion_log.add = lambda completion: (sampled.append(completion), add(completion))[1]
        salts = record_cache_salts(sampler)
        run_orchestrator(prime_rl, tmp_path, policy, sampler.url)
    outputs = tmp_path / "outputs"
    assert last_batch(outputs) == STEPS
    trained = [sequence for step in range(1, STEPS + 1) for sequence in sequences(outputs, step)]
    versions, max_difference, branches = set(), 0.0, Counter()
    for sequence in trained:
        spans = sampled_spans(sequence)
        completions = [sampled_completion(sampled, sequence, start, end) for start, end in spans]
        for completion, (start, end) in zip(completions, spans, strict=True):
            pairs = zip(completion.logprobs, sequence.logprobs[start:end], strict=True)
            max_difference = max(max_difference, *(abs(ours - theirs) for ours, theirs in pairs))
            versions.add(completion.version)
        branches[completions[0].session_id] += 1
    assert max_difference < 1e-6
    # Trials that started under different policies never share blocks of the prefix cache.
    # A fast machine plays two steps under the first policy.
    assert {"0"} < set(salts) <= set(map(str, range(STEPS + 1)))
    assert len(versions) >= 2, "later batches were sampled by later policies"
    assert any(advantage for sequence in trained for advantage in sequence.advantages)
    assert set(branches.values()) == {1}, "a trial is one sample"
    check_documented_metrics(outputs / "metrics.jsonl")
    smaller = check_groups(outputs)
    assert smaller > 0, "no group with a failed trial was trained"
    assert "no run key" not in (tmp_path / "env_server.log").read_text(), "requests are signed"
    print(
        f"{len({c.session_id for c in sampled})} trials run, {len(branches)} trained in {STEPS} batches, one branch "
        f"each, {smaller} smaller groups; policy versions {sorted(versions)}; "
        f"largest log-probability difference {max_difference:.2g}"
    )
