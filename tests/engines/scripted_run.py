"""The real training loop on scripted trials, without a model.

Real: the loop, verifiers' episode format and the completion log. Fake: the environment server, the sampler and the
learner.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from verifiers.v1.episode import WireEpisode

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.sampler.completion_log import Completion, CompletionLog
from harbortrainer.engines.local.train import LoopComponents, TrainingLoop
from harbortrainer.runs.checkpoints import Progress
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.trials.outcome import Outcome

SEQ_LEN, GROUP, BATCH = 12, 4, 8
FAIL = None


@dataclass(frozen=True)
class ScriptedTask:
    """One task and its trials.

    Attributes:
        rewards: Rewards of the trials, repeated; `FAIL` is a failed trial. A group with one plays a fifth trial.
        answer_len: Tokens of the first answer; each later answer has one token more.
        age: Versions between the policy that samples the answers and the newest one.
    """

    name: str
    rewards: Sequence[float | None]
    answer_len: int = 3
    age: int = 0


TASKS = (
    ScriptedTask("signal", [1.0, 0.0, 0.5, FAIL, 0.5]),
    ScriptedTask("equal", [0.0, 0.0, 0.0, 0.0]),
    ScriptedTask("lost", [FAIL, FAIL, 1.0, FAIL, FAIL]),
    ScriptedTask("old", [1.0, 0.0, 1.0, 0.0], age=2),
    ScriptedTask("long", [2.0, -1.0, 0.0, 0.25], answer_len=15),
)


class FakeComponents:
    """Fake source, sampler and learner in one object; it records the calls of the loop."""

    name, group_size, temperature = "scripted", GROUP, 1.0

    def __init__(self, tasks: Sequence[ScriptedTask] = TASKS) -> None:
        self.tasks, self.completion_log, self.version, self.sampler_version = tasks, CompletionLog(), 0, 0
        self.config, self.algo = SimpleNamespace(ratio=1.0), Algo()
        self.curriculum = Curriculum(None, [self.key_of(index) for index in range(len(tasks))])
        self.started: defaultdict[int, int] = defaultdict(int)
        """Trials started, by task index."""
        self.trained: list[list[Sample]] = []
        """Samples of each step."""
        self.rescored_versions: list[int] = []
        """The sampler's version at each call of `rescore`, which returns the number of that call."""
        self.rescored: list[list[object]] = []
        """Results of `rescore` that each step received."""
        self.adapter_config = {"r": 1, "lora_alpha": 1, "lora_dropout": 0, "target_modules": ["q"], "bias": "none"}
        self.adapter_config |= {"task_type": "CAUSAL_LM"}

    # source
    def key_of(self, index: int) -> str:
        return f"key-{index}"

    def rollout(self, index: int) -> Rollout:
        task = self.tasks[index].name
        return Rollout(source=self.name, task=task, task_key=self.key_of(index), outcome=Outcome.agent_error)

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        number = self.started[index]
        self.started[index] += 1
        script = self.tasks[index]
        return self._episode(
            script, f"{script.name}-{number}", script.rewards[number % len(script.rewards)], turns=1 + number % 2
        )

    def _episode(self, script: ScriptedTask, trial: str, reward: float | None, *, turns: int) -> WireEpisode:
        nodes, length = [], 0
        for turn in range(turns):
            parent = 2 * turn - 1 if turn else None
            answer = list(range(100, 100 + script.answer_len + turn))
            nodes.append(_node(parent, "user", [turn, 1], []))
            nodes.append(_node(2 * turn, "assistant", answer, [-0.5] * len(answer)))
            length += 2
            completion = Completion(
                trial, f"{trial}/{turn}", length, tuple(answer), (-0.5,) * len(answer), self.version - script.age
            )
            self.completion_log.add(completion)
            length += len(answer)
        failed = reward is None
        record = {
            "outcome": "sandbox_error" if failed else "completed",
            "task": script.name,
            "task_key": self.key_of(self.tasks.index(script)),
            "trial_name": f"trial-{trial}",
            "reward": reward,
            "rewards": None if failed else {"reward": reward},
            "turns": turns,
        }
        errors = [{"type": "TrialFailedError", "message": "sandbox_error: it died"}] if failed else []
        task = {"type": "T", "data": {"name": script.name}, "key": record["task_key"]}
        trace = {"id": trial, "task": task, "agent": {"config": {}}, "nodes": nodes, "ok": not failed, "errors": errors}
        trace |= {"rewards": {} if failed else {"reward": {"score": reward}}, "info": {"harbor": record}}
        return WireEpisode.model_validate({"task": task, "ok": not failed, "traces": [trace]})

    # sampler
    url = "http://127.0.0.1:9/"

    def load_adapter(self, source: object, version: int, *, config: object) -> float:
        self.sampler_version = version
        return 0.0

    def load_weights(self, source: object, version: int) -> float:
        self.sampler_version = version
        return 0.0

    def stats(self) -> dict[str, float]:
        return {"sampled_tokens": 0.0}

    def rescore(self) -> list:
        self.rescored_versions.append(self.sampler_version)
        return [len(self.rescored_versions)]

    def stop(self) -> None: ...

    # learner
    def weights(self, version: int) -> dict:
        return {}

    def train(self, samples: Sequence[Sample], rescored: Sequence[object] = ()) -> dict[str, float]:
        self.trained.append(list(samples))
        self.rescored.append(list(rescored))
        self.version += 1
        # The real learner counts the samples that it receives.
        return {"samples/trained": float(len(samples)), "samples/truncated": 0.0, "tokens/truncated": 0.0}

    def save(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"weights" * 10)

    def load(self, folder: Path) -> None: ...


def _node(parent: int | None, role: str, tokens: list[int], logprobs: list[float]) -> dict:
    sampled = role == "assistant"
    return {
        "parent": parent,
        "message": {"role": role, "content": "x"},
        "sampled": sampled,
        "token_ids": tokens,
        "mask": [sampled] * len(tokens),
        "logprobs": logprobs,
    }


@dataclass
class ScriptedRun:
    """A run of the loop with fake components; `folder` is the run folder, in `output_dir`."""

    output_dir: Path
    steps: int = 3
    components: FakeComponents = field(default_factory=FakeComponents)

    def __post_init__(self) -> None:
        env = {"taskset": {"id": "harbor_env", "tasks_dir": "."}}
        orchestrator = {"batch_size": BATCH, "group_size": GROUP, "max_off_policy_steps": 1}
        table = {
            "max_steps": self.steps,
            "seq_len": SEQ_LEN,
            "output_dir": str(self.output_dir),
            "run": {"name": "small"},
            "model": {"name": "none"},
            "trainer": {"model": {"lora": {"rank": 1}}},
            "orchestrator": {**orchestrator, "train": {"source": [{"name": "scripted", "env": env}]}},
        }
        self.config = RunConfig.model_validate(table)
        self.folder = RunFolder(self.output_dir / "small")
        for path in (self.folder.rollouts, self.folder.checkpoints, self.folder.trials):
            path.mkdir(parents=True, exist_ok=True)

    async def train(self, progress: Progress | None = None) -> None:
        """Train from the step of `progress`, or from the first step, to the last."""
        await self.loop(progress).run_remaining_steps()

    def loop(self, progress: Progress | None = None) -> TrainingLoop:
        """Return the loop that `train` runs."""
        fake = self.components
        components = LoopComponents(
            sampler=fake,
            learner=fake,
            train={fake.name: fake},  # ty: ignore[invalid-argument-type]
            held_out={},
            display=Display(),
            usage=lambda: (1.0, 1.0, 2.0),
        )
        return TrainingLoop(self.config, self.folder, components, progress or Progress())
