"""Run folders of Prime-RL in both layouts: per step, and rewritten as the stream of newer releases.

The facts of the stream are those of its source (`src/prime_rl/monitors/file/`): episodes in numbered chunks, and the
step and advantage of a shipped trace as an annotation beside them.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prime_rl_configs import write_prime_rl_configs
from pyzstd import SeekableZstdFile
from view_runs import write_rows

FRAME_BYTES = 256
"""Bytes of a frame in a sealed file: small, so that a line lies in several."""


def episode(trial: str, *, advantage: float | None = None, ok: bool = True, **record: object) -> dict[str, Any]:
    """Return an episode's line: verifiers' `Episode.to_record` with this plugin's `harbor` record."""
    prompt_node = {"message": {"role": "user", "content": "sort it"}, "token_ids": [1, 2], "mask": [False, False]}
    answer_node: dict[str, object] = {
        "parent": 0,
        "message": {"role": "assistant", "content": "ls"},
        "sampled": True,
        "token_ids": [9, 4, 5],
        "mask": [False, True, True],
        "logprobs": [-0.5, -1.5],
        "advantages": None if advantage is None else [advantage, advantage],
    }
    harbor_record: dict[str, object] = {
        "outcome": "completed",
        "task": "sort",
        "task_key": "k",
        "trial_name": trial,
        "reward": 1.0,
        "rewards": {"reward": 1.0},
        "timings": {"agent_execution": 4.0, "model": 3.0, "total": 5.0},
    }
    trace = {
        "id": f"id-{trial}",
        "nodes": [prompt_node, answer_node],
        "calls": [{"node": 1, "finish_reason": "stop", "time": {"start": 1.0, "end": 2.0}}],
        "info": {"harbor": harbor_record | record},
        "errors": [] if ok else [{"type": "SandboxError", "message": "gone"}],
        "ok": ok,
    }
    work = {"type": "train", "step": 1, "policy": {"start": 3, "end": 3}}
    return {
        "id": f"e-{trial}",
        "ok": ok,
        "env": {"id": "harbor_env"},
        "task": {"key": "k", "data": {"name": "sort"}},
        "group": {"id": "g-eval" if trial == "e" else "g1"},
        "run": {"type": "train", "id": "r", "work": work},
        "traces": [trace],
    }


def write_step_run(run: Path, model: str) -> Path:
    """Write a run in the layout per step: trained, untrained and failed trials, and an evaluation."""
    all_episodes = [
        episode("a"),
        episode("b", reward=0.0),
        episode("c"),
        episode("d", ok=False, outcome="sandbox_error", reward=None, rewards=None),
    ]
    effective_episodes = [episode("a", advantage=0.5), episode("b", advantage=-0.5, reward=0.0)]
    write_rows(run / "rollouts/step_1/train/all/traces.jsonl", all_episodes)
    write_rows(run / "rollouts/step_2/train/effective/traces.jsonl", effective_episodes)
    write_rows(run / "rollouts/step_1/eval/all/traces.jsonl", [episode("e")])
    write_rows(run / "rollouts/step_1/eval/effective/traces.jsonl", [episode("e")])
    metrics = [
        {"step": 1, "time/step": 9.0, "time/pack": 1.0, "train/agg/all/agent/reward/mean": 0.5},
        {"step": 1, "time/step": 8.0, "time/wait_for_batch": 6.0, "time/forward_backward": 2.0},
    ]
    write_rows(run / "metrics.jsonl", metrics)
    write_prime_rl_configs(run, model)
    return run


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def append_lines(file: Path, lines: Iterable[object]) -> None:
    """Append lines of JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def seal(file: Path) -> None:
    """Compress a file beside itself, and remove it."""
    with SeekableZstdFile(f"{file}.zst", "wb", max_frame_content_size=FRAME_BYTES) as sealed:
        sealed.write(file.read_bytes())
    file.unlink()


def arrived(episode: dict[str, Any], kind: str, step: int) -> dict[str, Any]:
    """Return an episode as it is when it arrives: without advantages, with its kind and its step."""
    episode = json.loads(json.dumps(episode))
    for trace in episode["traces"]:
        trace["info"] |= {"kind": kind, "arrival": {"step": step, "time": 9.0}}
        for node in trace["nodes"]:
            node.pop("advantages", None)
    return episode


def shipped(episode: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the orchestrator's annotations of a shipped episode. Its traces have one branch."""
    records = []
    for trace in episode["traces"]:
        info: dict[str, object] = {"effective": True, "ship": {"step": step, "time": 10.0}}
        tokens: list[float | None] = []
        for node in trace["nodes"]:
            values = iter(node.get("advantages") or [])
            tokens += [next(values, None) if sampled else None for sampled in node["mask"]]
        known = [value for value in tokens if value is not None]
        info |= {"advantage": sum(known) / len(known)} if known else {}
        records.append({"version": 1, "trace_id": trace["id"], "info": info})
        records[-1]["branches"] = [{"index": 0, "advantages": tokens}] if known else []
    return records


class StreamRun:
    """A run folder of the newer layout.

    Args:
        path: The folder.
        root: Folder of the traces and metrics in it.
    """

    def __init__(self, path: Path, root: str = "monitors/file") -> None:
        self.path, self.root = path, path / root
        self.traces = self.root / "traces"

    def chunk(self, number: int) -> Path:
        """Return the plain file of a chunk."""
        return self.traces / f"stream/{number:05d}.jsonl"

    def add(self, episodes: Iterable[dict[str, Any]], chunk: int = 0) -> None:
        """Append episodes to a chunk, and a line for each to the index."""
        for episode in episodes:
            append_lines(self.chunk(chunk), [episode])
            append_lines(self.traces / "stream.index.jsonl", [{"id": episode["id"], "chunk": chunk}])

    def annotate(self, records: Iterable[dict[str, Any]], producer: str = "orch") -> None:
        """Append annotations of a producer, and a line for each to their index."""
        folder = self.traces / "annotations"
        chunk = folder / producer / "00000.jsonl"
        for record in records:
            offset = chunk.stat().st_size if chunk.is_file() else 0
            append_lines(chunk, [record])
            line = {"trace_id": record["trace_id"], "chunk": 0, "offset": offset, "info": record["info"]}
            append_lines(folder / f"{producer}.index.jsonl", [line])


def converted(old: Path, new: Path, *, root: str = "monitors/file", chunks: int = 2) -> StreamRun:
    """Write a copy of a run in the newer layout.

    Args:
        old: The run in the layout per step. Its evaluation at step N is of policy version N - 1.
        new: The folder to write.
        root: Folder of the traces and metrics in it.
        chunks: Number of chunks of the stream.
    """
    run, steps = StreamRun(new, root), sorted(path.name for path in (old / "rollouts").glob("step_*"))
    episodes = []
    for name in steps:
        step = int(name.removeprefix("step_"))
        for kind, own in (("train", step), ("eval", max(0, step - 1))):
            episodes += [
                arrived(one, kind, own) for one in read_lines(old / f"rollouts/{name}/{kind}/all/traces.jsonl")
            ]
    for number, episode in enumerate(episodes):
        run.add([episode], chunk=number * chunks // len(episodes))
    for name in steps:
        step = int(name.removeprefix("step_"))
        for episode in read_lines(old / f"rollouts/{name}/train/effective/traces.jsonl"):
            run.annotate(shipped(episode, step))
            run.annotate(
                [{"trace_id": one["id"], "chunk": 0, "offset": 0, "info": {}} for one in episode["traces"]], "trainer"
            )
    for line in read_lines(old / "metrics.jsonl"):
        append_lines(run.root / "metrics.jsonl", [line | {"producer": "orch" if "time/pack" in line else "trainer"}])
    append_lines(run.root / "metrics.jsonl", [{"step": None, "time": 1.0, "inference/running": 4, "producer": "orch"}])
    configs = new / "configs/attempt_1/resolved"
    shutil.copytree(old / "configs", configs)
    (new / "configs/latest").symlink_to("attempt_1")
    return run
