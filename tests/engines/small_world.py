"""The real loop, from episode to learner, in a world without models: tasks whose trials end as a script says.

Episodes are verifiers' own wire format, the ledger the sampler's own; what stands in is the environment server, the
sampler and the learner.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from verifiers.v1.episode import WireEpisode

from harbortrainer.config.algo_table import Algo
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.sampler.ledger import Completion, Ledger
from harbortrainer.engines.local.train import Parts, TrainingLoop
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.progress import Progress
from harbortrainer.trials.outcome import Outcome

SEQ_LEN, GROUP, BATCH = 12, 4, 8
FAIL = None


@dataclass(frozen=True)
class Script:
    """One task: each trial's reward, how long its answers are, and how old the policy is that gives them."""

    name: str
    rewards: Sequence[float | None]
    answer: int = 3
    age: int = 0


TASKS = (
    Script("signal", [1.0, 0.0, 0.5, FAIL]),
    Script("equal", [0.0, 0.0, 0.0, 0.0]),
    Script("lost", [FAIL, FAIL, 1.0, FAIL]),
    Script("old", [1.0, 0.0, 1.0, 0.0], age=2),
    Script("long", [2.0, -1.0, 0.0, 0.25], answer=15),
)


class World:
    """A source, a sampler and a learner in one: everything that the loop is given."""

    name, group_size, temperature = "scripted", GROUP, 1.0

    def __init__(self, tasks: Sequence[Script] = TASKS) -> None:
        self.tasks, self.ledger, self.version, self.sampling = tasks, Ledger(), 0, 0
        self.config, self.algo = SimpleNamespace(ratio=1.0), Algo()
        self.curriculum = Curriculum(None, [self.key_of(index) for index in range(len(tasks))])
        self.played: defaultdict[int, int] = defaultdict(int)
        self.taught: list[list[Sample]] = []
        self.scored: list[int] = []
        """The version that was asked each time to score again."""
        self.rescored: list[list[object]] = []
        """What the learner was given of that, step by step."""
        self.adapter_config = {"r": 1, "lora_alpha": 1, "lora_dropout": 0, "target_modules": ["q"], "bias": "none"}
        self.adapter_config |= {"task_type": "CAUSAL_LM"}

    # the source
    def key_of(self, index: int) -> str:
        return f"key-{index}"

    def rollout(self, index: int) -> Rollout:
        task = self.tasks[index].name
        return Rollout(source=self.name, task=task, task_key=self.key_of(index), outcome=Outcome.agent_error)

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        number = self.played[index]
        self.played[index] += 1
        script = self.tasks[index]
        return self._episode(script, f"{script.name}-{number}", script.rewards[number % GROUP], turns=1 + number % 2)

    def _episode(self, script: Script, trial: str, reward: float | None, *, turns: int) -> WireEpisode:
        nodes, length = [], 0
        for turn in range(turns):
            parent = 2 * turn - 1 if turn else None
            answer = list(range(100, 100 + script.answer + turn))
            nodes.append(_node(parent, "user", [turn, 1], []))
            nodes.append(_node(2 * turn, "assistant", answer, [-0.5] * len(answer)))
            length += 2
            completion = Completion(
                trial, f"{trial}/{turn}", length, tuple(answer), (-0.5,) * len(answer), self.version - script.age
            )
            self.ledger.enter(completion)
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

    # the sampler
    url = "http://127.0.0.1:9/"

    def load_adapter(self, source: object, version: int, *, config: object) -> float:
        self.sampling = version
        return 0.0

    def load_weights(self, source: object, version: int) -> float:
        self.sampling = version
        return 0.0

    def stats(self) -> dict[str, float]:
        return {"sampled_tokens": 0.0}

    def score_again(self) -> list:
        self.scored.append(self.sampling)
        return [len(self.scored)]

    def stop(self) -> None: ...

    # the learner
    def weights(self, version: int) -> dict:
        return {}

    def train(self, samples: Sequence[Sample], rescored: Sequence[object] = ()) -> dict[str, float]:
        self.taught.append(list(samples))
        self.rescored.append(list(rescored))
        self.version += 1
        # What the real one counts: of what it is given.
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
class SmallRun:
    """One run in such a world."""

    folder: Path
    steps: int = 3
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        env = {"taskset": {"id": "harbor_env", "tasks_dir": "."}}
        orchestrator = {"batch_size": BATCH, "group_size": GROUP, "max_off_policy_steps": 1}
        table = {
            "max_steps": self.steps,
            "seq_len": SEQ_LEN,
            "output_dir": str(self.folder),
            "run": {"name": "small"},
            "model": {"name": "none"},
            "trainer": {"model": {"lora": {"rank": 1}}},
            "orchestrator": {**orchestrator, "train": {"source": [{"name": "scripted", "env": env}]}},
        }
        self.config = RunConfig.model_validate(table)
        self.run = RunFolder(self.folder / "small")
        for path in (self.run.rollouts, self.run.checkpoints, self.run.trials):
            path.mkdir(parents=True, exist_ok=True)

    async def play(self) -> None:
        """From the first step to the last."""
        world = self.world
        parts = Parts(
            sampler=world,
            learner=world,
            train={world.name: world},  # ty: ignore[invalid-argument-type]
            held_out={},
            display=Display(),
            used=lambda: (1.0, 1.0),
        )
        await TrainingLoop(self.config, self.run, parts, Progress()).run_all()
