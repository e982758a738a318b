"""verifiers' own eval plays the plugin from the file that docs/evaluate.md shows; both pairs of releases."""

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
OLD = version("verifiers").startswith("0.3.")


def the_pages_file(tasks: Path, url: str) -> str:
    """The file of the page, for other tasks and another server; spelled as the page says for each release."""
    (written,) = re.findall(r"```toml\n# eval\.toml\n(.*?)```", PAGE, re.DOTALL)
    data = tomllib.loads(written)
    data["env"]["taskset"]["tasks_dir"] = str(tasks)
    data["client"]["base_url"] = f"{url}/v1"
    if not OLD:
        data["select"] = {"limit": data.pop("num_tasks")}
    return tomlkit.dumps(data)


def test_the_file_of_the_page_is_played_and_every_trial_told(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        (tmp_path / "eval.toml").write_text(the_pages_file(tmp_path / "tasks", engine.url))
        words = ["@", "eval.toml", "--no-push", "--no-rich", *(["--no-serve"] if OLD else [])]
        environment = os.environ | {"OPENAI_API_KEY": "none"}
        subprocess.run([sys.executable, "-c", EVAL, *words], cwd=tmp_path, env=environment, check=True, timeout=600)
    (lines,) = (tmp_path / "outputs").rglob("traces.jsonl")
    traces = [trace for line in lines.read_text().splitlines() for trace in json.loads(line)["traces"]]
    assert [trace["info"]["harbor"]["outcome"] for trace in traces] == ["completed"] * 2
    assert [trace["rewards"]["reward"]["score"] for trace in traces] == [1.0] * 2
