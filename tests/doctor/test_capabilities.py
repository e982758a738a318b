"""The doctor without a run file: what this machine can do, and what to install for more. Nothing there is an error."""

from pathlib import Path

import pytest

from harbortrainer.cli import main
from harbortrainer.doctor import capabilities, docker_daemon, machine_checks
from harbortrainer.doctor.capabilities import examine_capabilities
from harbortrainer.doctor.finding import Finding, Level
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import EngineChoice, Gpu
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.errors import UserError

pytestmark = pytest.mark.process


def found(tmp_path: Path, gpus: list[Gpu]) -> dict[str, Finding]:
    plan = LaunchPlan(choice=EngineChoice("local", ""), checkout=Checkout(tmp_path), gpus=gpus)
    return {finding.about: finding for finding in examine_capabilities(plan)}


def test_lists_what_works_here(tmp_path: Path):
    rows = found(tmp_path, [Gpu("NVIDIA L4", 23034)])
    assert "NVIDIA L4 (22 GiB); " in rows["processors"].what
    assert rows["embedded engine"].what.startswith("torch ")
    assert rows["local sandbox"].level is Level.GREEN
    assert "terminus-2 and plain" in rows["agents"].what and "17 agents of Harbor can't" in rows["agents"].what
    assert "task's image" in rows["agents"].do
    assert (rows["vLLM"].level, rows["Prime-RL"].level) == (Level.YELLOW, Level.YELLOW)


def test_nothing_missing_is_an_error_and_all_of_it_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lacks(*modules: str) -> None:
        raise UserError(f"not installed: {modules}", do="install them")

    monkeypatch.setattr(capabilities, "require_extra", lacks)
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    monkeypatch.setattr(docker_daemon, "daemon", lambda: "docker is not installed")
    rows = found(tmp_path, [])
    missing = {about for about, finding in rows.items() if finding.level is Level.YELLOW}
    assert missing >= {"embedded engine", "Prime-RL", "local sandbox", "Docker"}
    assert all(finding.level is not Level.RED for finding in rows.values())
    assert all(rows[about].do for about in missing)
    assert "vLLM" not in rows


def test_names_the_missing_providers_in_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capabilities, "find_spec", lambda _: None)
    plan = LaunchPlan(choice=EngineChoice("local", ""), checkout=Checkout(tmp_path), gpus=[])
    (row,) = [one for one in examine_capabilities(plan) if "not installed: " in one.what and one.about == "sandboxes"]
    assert "modal" in row.what and "daytona" in row.what
    assert row.do == "run `pip install 'harbor[NAME]'` for one of them"


def test_command_without_run_file_succeeds(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "processors" in output
    assert output.endswith("`harbortrainer doctor --config FILE` checks a run file, and this machine for it.\n")
