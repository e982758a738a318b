"""Runs one trial of a feature in one place, with the same scripted model everywhere, and reads Harbor's results.

The place `harbor` uses only Harbor's Trial, Docker environment and Terminus-2, without this project's code.
"""

import json
import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fakes import DONE, Reply, ScriptedModel, keys
from parity_feature import Feature, Place

from harbortrainer.trials import ModelEndpoint, TrialSpec, run_trial

KWARGS: dict[str, dict[str, object]] = {
    "host": {"image": "host"},
    "image": {"image": "build"},
    "image tools": {"image": "host", "verifier_tools": "image"},
    "docker": {},
}
_KEPT = ("artifacts", "verifier")


class HarborRefusedError(Exception):
    """Harbor refused to create the trial."""


@dataclass(frozen=True)
class Played:
    """Results of a trial that do not depend on the machine."""

    rewards: dict[str, float] | None
    steps: list[tuple[str, dict[str, float] | None, str | None]]
    """Name, rewards and exception of each step."""
    exception: str | None
    """Type of the exception, and the message of a timeout."""
    phases: list[str]
    prompted: bool = False
    """Whether the first message contained the feature's text."""
    files: dict[str, str] = field(default_factory=dict)
    """Artifacts and verifier files that Harbor collected, by path."""

    def to_json(self) -> Any:
        """Return the value that JSON reads back."""
        return json.loads(json.dumps(asdict(self)))

    def __str__(self) -> str:
        """Format as a cell of the table."""
        steps = ", ".join(_shown(rewards) for _, rewards, _ in self.steps)
        result = self.exception or _shown(self.rewards)
        return f"{result} ({steps})" if steps else result


def _shown(rewards: Mapping[str, float] | None) -> str:
    if rewards is None:
        return "none"
    if set(rewards) == {"reward"}:
        return f"{rewards['reward']:g}"
    return ", ".join(f"{name} {value:g}" for name, value in sorted(rewards.items()))


async def play(feature: Feature, place: Place, folder: Path) -> Played:
    """Run one trial of the feature's task."""
    task = feature.write(folder / "task")
    first = Reply(content=keys(*feature.types.splitlines(), duration=feature.types_s), delay_s=feature.thinks_s)
    phases: list[str] = []
    async with ScriptedModel([first, DONE, DONE]).serve() as model:
        with _variables(feature.host_env):
            if place == "harbor":
                trial = await _play_harbor(feature, task, folder, model.url, phases)
            else:
                trial = await _play_ours(feature, place, task, folder, model.url, phases)
    messages = str(model.requests[0]["messages"]) if model.requests else ""
    return replace(read(trial, phases), prompted=bool(feature.prompted) and feature.prompted in messages)


@contextmanager
def _variables(env: Mapping[str, str]):
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


async def _play_ours(feature: Feature, place: Place, task: Path, folder: Path, url: str, phases: list[str]) -> Path:
    async def note(event: str) -> None:
        phases.append(event)

    spec = TrialSpec(
        task_dir=task,
        trials_dir=folder / "trials",
        trial_name=folder.name,
        model=ModelEndpoint(name="scripted", base_url=url),
        timeout_multiplier=feature.timeout_multiplier,
        environment_type="docker" if place == "docker" else "local",
        environment_kwargs=KWARGS[place],
    )
    await run_trial(spec, on_event=note)
    return folder / "trials" / folder.name


async def _play_harbor(feature: Feature, task: Path, folder: Path, url: str, phases: list[str]) -> Path:
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.hooks import TrialEvent, TrialHookEvent
    from harbor.trial.trial import Trial

    async def note(event: TrialHookEvent) -> None:
        phases.append(event.event.value)

    terminus = {
        "api_base": url,
        "record_terminal_session": False,
        "enable_summarize": False,
        "llm_kwargs": {"custom_llm_provider": "openai", "api_key": "EMPTY"},
        "model_info": {"max_input_tokens": 32768, "input_cost_per_token": 0.0, "output_cost_per_token": 0.0},
    }
    config = TrialConfig(
        task=TaskConfig(path=task),
        trial_name=folder.name,
        trials_dir=folder / "trials",
        timeout_multiplier=feature.timeout_multiplier,
        agent=AgentConfig(name="terminus-2", model_name="scripted", kwargs=terminus),
        environment=EnvironmentConfig.model_validate({"type": "docker"}),
    )
    try:
        trial = await Trial.create(config)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        raise HarborRefusedError(str(error)) from error
    for event in TrialEvent:
        trial.add_hook(event, note)
    await trial.run()
    return folder / "trials" / folder.name


def read(trial: Path, phases: list[str]) -> Played:
    """Read Harbor's results from a trial's folder."""
    result = json.loads((trial / "result.json").read_text())
    steps = result.get("step_results") or []
    files = dict(sorted(_files(trial)))
    if (_exception(result) or "").startswith("VerifierTimeoutError"):
        files.pop("verifier/test-stdout.txt", None)  # its length depends on the machine's speed
    return Played(
        rewards=_rewards(result),
        steps=[(step["step_name"], _rewards(step), _exception(step)) for step in steps],
        exception=_exception(result),
        phases=phases,
        files=files,
    )


def _rewards(part: Mapping[str, Any]) -> dict[str, float] | None:
    found = part.get("verifier_result")
    return found["rewards"] if found else None


def _exception(part: Mapping[str, Any]) -> str | None:
    info = part.get("exception_info")
    if not info:
        return None
    kind = info["exception_type"]
    return f"{kind}: {info['exception_message']}" if kind.endswith("TimeoutError") else kind


def _files(trial: Path):
    for folder in [trial, *sorted(trial.glob("steps/*"))]:
        for part in _KEPT:
            for path in sorted((folder / part).rglob("*")):
                if path.is_file() and not path.is_symlink():
                    text = path.read_text(errors="replace")
                    yield str(path.relative_to(trial)), _artifact_status(text) if path.name == "manifest.json" else text


def _artifact_status(manifest: str) -> str:
    """Return the status of the task's artifacts, without Harbor's own folder: it is `empty` only if mounted."""
    entries = [entry for entry in json.loads(manifest) if entry["source"] != "/logs/artifacts"]
    return ", ".join(f"{entry['source']} {entry['type']} {entry['status']}" for entry in entries)
