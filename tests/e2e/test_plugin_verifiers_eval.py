"""verifiers' eval command runs the plugin from the config file in docs/evaluate.md, with verifiers 0.3 or later."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import tomlkit
from fakes import DONE, keys, make_task
from scripted_engine import ScriptedEngine, by_turn

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
EVAL = "from verifiers.v1.cli.eval.main import main; main()"
VERIFIERS_0_3 = version("verifiers").startswith("0.3.")


def documented_eval_file(tasks: Path, url: str) -> str:
    """Return the page's eval.toml with other tasks and another server, for the installed verifiers release."""
    (text,) = re.findall(r"```toml\n# eval\.toml\n(.*?)```", PAGE, re.DOTALL)
    data = tomllib.loads(text)
    data["env"]["taskset"]["tasks_dir"] = str(tasks)
    data["client"]["base_url"] = f"{url}/v1"
    if not VERIFIERS_0_3:
        data["select"] = {"limit": data.pop("num_tasks")}
    return tomlkit.dumps(data)


def test_documented_eval_file_runs_and_reports_every_trial(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        (tmp_path / "eval.toml").write_text(documented_eval_file(tmp_path / "tasks", engine.url))
        arguments = ["@", "eval.toml", "--no-push", "--no-rich", *(["--no-serve"] if VERIFIERS_0_3 else [])]
        environment = os.environ | {"OPENAI_API_KEY": "none"}
        subprocess.run([sys.executable, "-c", EVAL, *arguments], cwd=tmp_path, env=environment, check=True, timeout=600)
    (lines,) = (tmp_path / "outputs").rglob("traces.jsonl")
    traces = [trace for line in lines.read_text().splitlines() for trace in json.loads(line)["traces"]]
    assert [trace["info"]["harbor"]["outcome"] for trace in traces] == ["completed"] * 2
    assert [trace["rewards"]["reward"]["score"] for trace in traces] == [1.0] * 2
