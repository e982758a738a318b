"""Run folder with checkpoints saved by a real learner; no training loop runs."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from prime_rl_configs import write_prime_rl_configs
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.runs.checkpoints import Progress, save
from harbortrainer.runs.durable import write_lines
from harbortrainer.runs.provenance import FILE, Provenance, TaskOrigin, model_fingerprints

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN_IDS = [9, 10, 11, 40, 41, 42, 7, 8]
SECRET = "sk-very-secret"
CONFIG = """
output_dir = "{root}/outputs"
[run]
name = "mini"
[model]
name = "{model}"
[orchestrator.renderer]
name = "qwen3"
[[orchestrator.train.source]]
name = "own"
env.taskset = {{ id = "harbor_env", tasks_dir = "{root}/tasks" }}
env.agent.harness.agent_kwargs = {{ api_key = "{secret}" }}
"""


@dataclass(frozen=True)
class TrainedRun:
    """Run folder, base model folder, and log-probabilities of the trained policy."""

    path: Path
    model: Path
    logprobs: torch.Tensor
    """[T, V] for `TOKEN_IDS`, from the learner's module."""


def write_trained_run(
    root: Path, *, on_hub: bool, targets: tuple[str, ...] = ("q_proj", "down_proj"), full_fine_tuning: bool = False
) -> TrainedRun:
    """Write a run of two steps; with `on_hub`, its base model is in the hub's cache."""
    model = root / (f"models--org--tiny/snapshots/{COMMIT}" if on_hub else "model")
    build_tiny_model(model)
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    lora = None if full_fine_tuning else LoraSettings(rank=4, target_modules=list(targets))
    learner = Learner(str(model), lora, OptimSettings(), DefaultLoss())
    policy = learner._policy
    torch.manual_seed(5)
    policy.set_weights({name: 0.1 * torch.randn(weight.shape) for name, weight in policy.weights().items()})
    run = root / "outputs" / "mini"
    for step in (1, 2):
        save(run / "checkpoints", learner.save, Progress(step=step))
    (run / "config.toml").write_text(CONFIG.format(root=root, model=model, secret=SECRET))
    tasks, origins = {"own": {"sort": "key-1", "join": "key-2"}}, {"own": TaskOrigin(source=f"{root}/tasks")}
    provenance = Provenance(weights=model_fingerprints(str(model)), tasks=tasks, origins=origins)
    (run / FILE).write_text(provenance.model_dump_json())
    rewards = [{"step": step, "train/agg/all/agent/reward/mean": 0.1 + 0.2 * step} for step in (1, 2)]
    evaluation = {"mean_reward": 0.75, "n": 64, "stderr": 0.03, "tasks": 32, "low": 0.69, "high": 0.81}
    write_lines(run / "metrics.jsonl", [*rewards, {"step": 2, **{f"eval/{k}": v for k, v in evaluation.items()}}])
    return TrainedRun(run, model, logprobs_of(policy.model))


def write_prime_rl_run(run: TrainedRun, root: Path) -> Path:
    """Write the run's adapter with the folders and tensor names of Prime-RL's trainer; step 3 is incomplete."""
    from safetensors.torch import load_file, save_file

    prime_rl_run = root / "prime"
    harness = {"id": "harbor_env", "agent_kwargs": {"api_key": SECRET}}
    env = {"taskset": {"id": "harbor_env", "tasks_dir": f"{root}/tasks"}, "agent": {"harness": harness}}
    write_prime_rl_configs(prime_rl_run, str(run.model), env=env)
    for step in (1, 2, 3):
        folder = prime_rl_run / "broadcasts" / f"step_{step}"
        folder.mkdir(parents=True)
        tensors = load_file(run.path / "checkpoints/step_2/adapter_model.safetensors")
        prime_rl_tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
        save_file(prime_rl_tensors, folder / "adapter_model.safetensors")
        adapter_config = json.loads((run.path / "checkpoints/step_2/adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
        if step < 3:
            (folder / "STABLE").touch()
    return prime_rl_run


def move_to_newer_layout(prime_rl_run: Path) -> None:
    """Rename what newer releases of Prime-RL name otherwise: the marker of complete weights, and the configs."""
    for marker in prime_rl_run.glob("broadcasts/step_*/STABLE"):
        marker.rename(marker.with_name(".finished"))
    resolved = prime_rl_run / "configs" / "latest" / "resolved"
    resolved.mkdir(parents=True)
    for file in prime_rl_run.glob("configs/*.json"):
        file.rename(resolved / file.name)


@torch.no_grad()
def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """Return the log-probabilities [T, V] of a model."""
    return model.eval()(input_ids=torch.tensor([TOKEN_IDS])).logits[0].float().log_softmax(-1)
