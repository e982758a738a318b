"""A run folder with a real learner's checkpoints, without the hours that it takes to get one."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import LoraSettings, LossSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.runs.durable import write_lines
from harbortrainer.runs.ingredients import FILE, Ingredients, TaskOrigin, weights_of
from harbortrainer.runs.progress import Progress, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IDS = [9, 10, 11, 40, 41, 42, 7, 8]
SECRET = "sk-very-secret"
CONFIG = """
output_dir = "{root}/outputs"
[run]
name = "mini"
[model]
name = "{model}"
[[orchestrator.train.source]]
name = "own"
env.taskset = {{ id = "harbor_env", tasks_dir = "{root}/tasks" }}
env.agent.harness.agent_kwargs = {{ api_key = "{secret}" }}
"""


@dataclass(frozen=True)
class TrainedRun:
    """One run: its folder, its model and the log-probabilities of its policy."""

    path: Path
    model: Path
    logprobs: torch.Tensor
    """[T, V] of `IDS`, from the module that learned."""


def trained_run(
    root: Path, *, on_hub: bool, targets: tuple[str, ...] = ("q_proj", "down_proj"), every_weight: bool = False
) -> TrainedRun:
    """A run of two steps. `on_hub`: its model lies where the hub's client puts what it fetched."""
    model = root / (f"models--org--tiny/snapshots/{COMMIT}" if on_hub else "model")
    build_tiny_model(model)
    lora = None if every_weight else LoraSettings(rank=4, target_modules=list(targets))
    learner = Learner(str(model), lora, OptimSettings(), LossSettings())
    policy = learner._policy
    torch.manual_seed(5)
    policy.set_weights({name: 0.1 * torch.randn(weight.shape) for name, weight in policy.weights().items()})
    run = root / "outputs" / "mini"
    for step in (1, 2):
        save(run / "checkpoints", learner.save, Progress(step=step))
    (run / "config.toml").write_text(CONFIG.format(root=root, model=model, secret=SECRET))
    tasks, origins = {"own": {"sort": "key-1", "join": "key-2"}}, {"own": TaskOrigin(source=f"{root}/tasks")}
    made_of = Ingredients(weights=weights_of(str(model)), tasks=tasks, origins=origins)
    (run / FILE).write_text(made_of.model_dump_json())
    rewards = [{"step": step, "train/agg/all/agent/reward/mean": 0.1 + 0.2 * step} for step in (1, 2)]
    result = {"mean_reward": 0.75, "n": 64, "stderr": 0.03, "tasks": 32, "low": 0.69, "high": 0.81}
    write_lines(run / "metrics.jsonl", [*rewards, {"step": 2, **{f"eval/{k}": v for k, v in result.items()}}])
    return TrainedRun(run, model, logprobs_of(policy.model))


def as_prime_rl(run: TrainedRun, root: Path) -> Path:
    """The same weights as Prime-RL's trainer leaves them: its folders, its names of tensors."""
    from safetensors.torch import load_file, save_file

    prime = root / "prime"
    (prime / "configs").mkdir(parents=True)
    config = tomllib.loads((run.path / "config.toml").read_text())
    (prime / "configs" / "rl.json").write_text(json.dumps(config))
    for step in (1, 2, 3):
        folder = prime / "broadcasts" / f"step_{step}"
        folder.mkdir(parents=True)
        tensors = load_file(run.path / "checkpoints/step_2/adapter_model.safetensors")
        bare = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
        save_file(bare, folder / "adapter_model.safetensors")
        told = json.loads((run.path / "checkpoints/step_2/adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(told))
        if step < 3:
            (folder / "STABLE").touch()
    return prime


@torch.no_grad()
def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """[T, V] that a model gives."""
    return model.eval()(input_ids=torch.tensor([IDS])).logits[0].float().log_softmax(-1)
