"""Prime-RL's real orchestrator and env server on a CPU: our plugin, our sampler, real trials, a stand-in trainer."""

import json
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import MAX_LENGTH, PrimeRL
from fakes import make_task
from metrics_table import documented, matches
from orchestrator_endpoints import OrchestratorSampler
from stand_in_trainer import Sequence, StandInTrainer

from harbortrainer.engines.local.sampler import Completion, Sampler
from harbortrainer.engines.local.sampler.requests import GenerateRequest

pytestmark = pytest.mark.prime_rl

STEPS, BATCH, GROUP = 3, 8, 4
# A random policy solves nothing; a verdict that varies gives its groups something to tell apart.
VERDICT = "echo $((RANDOM % 5)) > /logs/verifier/reward.txt"
CURRICULUM = {"sampler": {"type": "difficulty_pool"}, "gates": {"signal": {}}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_configs(folder: Path, policy: Path, url: str) -> tuple[Path, Path]:
    """The orchestrator's file and the env server's, as `rl` would write them."""
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
    return log.read_text(errors="replace")[-4000:]


def run_orchestrator(prime_rl: PrimeRL, folder: Path, policy: Path, url: str) -> None:
    """Both programs, until the orchestrator has ended by itself."""
    orchestrator_config, server_config = write_configs(folder, policy, url)
    server = prime_rl.start("env-server", server_config, folder / "env_server.log")
    orchestrator = prime_rl.start("orchestrator", orchestrator_config, folder / "orchestrator.log")
    try:
        code = orchestrator.wait(timeout=900)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end:\n{tail(folder / 'orchestrator.log')}\n{tail(folder / 'env_server.log')}")
    finally:
        for process in (orchestrator, server):
            process.terminate()
            process.wait(30)
    assert code == 0, f"{tail(folder / 'orchestrator.log')}\n{tail(folder / 'env_server.log')}"


def sampled_spans(sequence: Sequence) -> list[tuple[int, int]]:
    """Start and end of every run of trained tokens."""
    spans, start = [], None
    for i, mine in enumerate([*sequence.mask, False]):
        if mine and start is None:
            start = i
        elif not mine and start is not None:
            spans.append((start, i))
            start = None
    return spans


def given_as(given: list[Completion], sequence: Sequence, start: int, end: int) -> Completion:
    """What the sampler gave at this place of a sample."""
    token_ids = tuple(sequence.token_ids[start:end])
    found = next((c for c in given if c.prompt_len == start and c.token_ids == token_ids), None)
    assert found is not None, "a trained token that the sampler never gave"
    return found


def salts_on_the_wire(sampler: Sampler) -> list[object]:
    """Grows with each call: the salt where vLLM reads it, and "misplaced" for one among the sampling parameters."""
    assert sampler._replies is not None
    generate, salts = sampler._replies.generate, []

    async def noting(request: GenerateRequest, session: str) -> dict[str, object]:
        inside = request.sampling_params.model_extra or {}
        salts.append("misplaced" if "cache_salt" in inside else (request.model_extra or {}).get("cache_salt"))
        return await generate(request, session)

    sampler._replies.generate = noting
    return salts


def compare_with_the_docs(written: Path) -> None:
    """Each metric of a step that docs/metrics.md gives to both engines is one that Prime-RL really writes."""
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    keys = {key for row in rows for key in row}
    names = [name for name in documented("both") if not name.startswith("eval/")]
    assert [name for name in names if not any(matches(name, key) for key in keys)] == []
    shares = [key for key in keys if "/all/agent/metrics/outcome_" in key and key.startswith("train/agg/")]
    assert any(sum(row.get(key, 0.0) for key in shares if key.endswith("/mean")) == pytest.approx(1.0) for row in rows)


def test_three_steps_train_on_exactly_what_the_sampler_gave(prime_rl: PrimeRL, policy: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name, test=VERDICT, extra=f"# {name}")
    trainer = StandInTrainer(policy, tmp_path / "outputs", STEPS)
    given: list[Completion] = []
    with OrchestratorSampler(policy, device="cpu", max_model_len=MAX_LENGTH) as sampler:
        enter = sampler.ledger.enter
        sampler.ledger.enter = lambda completion: (given.append(completion), enter(completion))[1]
        salts = salts_on_the_wire(sampler)
        trainer.start()
        run_orchestrator(prime_rl, tmp_path, policy, sampler.url)
    assert len(trainer.batches) == STEPS
    versions, worst, branches = set(), 0.0, Counter()
    for sequence in (sequence for batch in trainer.batches for sequence in batch):
        spans = sampled_spans(sequence)
        completions = [given_as(given, sequence, start, end) for start, end in spans]
        for completion, (start, end) in zip(completions, spans, strict=True):
            pairs = zip(completion.logprobs, sequence.logprobs[start:end], strict=True)
            worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
            versions.add(completion.version)
        branches[completions[0].session_id] += 1
    assert worst < 1e-6
    # What began under another policy never shares a block of the prefix cache.
    assert {"0", "1"} <= set(salts) <= {"0", "1", "2", "3"}
    assert len(versions) >= 2, "later batches were sampled by later policies"
    assert any(advantage for batch in trainer.batches for s in batch for advantage in s.advantages)
    assert set(branches.values()) == {1}, "a trial is one sample"
    compare_with_the_docs(tmp_path / "outputs" / "metrics.jsonl")
    print(
        f"{len({c.session_id for c in given})} trials played, {len(branches)} trained in {STEPS} batches, one branch "
        f"each; policy versions {sorted(versions)}; largest difference of log-probabilities {worst:.2g}"
    )
