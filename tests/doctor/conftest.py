"""Plans of run files given as tables."""

import pytest

from harbortrainer.config.prime_rl_run import plugin_envs, prime_run
from harbortrainer.config.reader import RawRun, from_raw
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import Engine, EngineChoice
from harbortrainer.engines.prime_rl.checkout import Checkout


def source_table(environment_type: str = "local", **harness) -> dict:
    return {
        "env": {"taskset": {"id": "harbor_env"}, "agent": {"harness": {"environment_type": environment_type} | harness}}
    }


@pytest.fixture
def source():
    """A function that returns a source with our plugin, as a table."""
    return source_table


@pytest.fixture
def plan(tmp_path):
    """A function that returns the plan of a run file given as tables."""

    def make(engine: Engine = "local", gpus=(), sources=None, checkout=None, resume=False, **data) -> LaunchPlan:
        orchestrator = data.pop("orchestrator", {})
        orchestrator["train"] = orchestrator.get("train", {}) | {"source": sources or [source_table()]}
        data.setdefault("trainer", {"model": {"lora": {}}})
        raw = RawRun("run.toml", data | {"orchestrator": orchestrator})
        run = prime_run(raw) if engine == "prime-rl" else from_raw(raw)
        return LaunchPlan(
            choice=EngineChoice(engine, "test"),
            checkout=checkout or Checkout(tmp_path / "prime-rl"),
            gpus=list(gpus),
            file=raw.file,
            run=run,
            envs=plugin_envs(run, raw.file),
            resume=resume,
        )

    return make
