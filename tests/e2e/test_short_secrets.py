"""A key of a few characters, such as a local server's `1`, leaves the numbers of a real trial's files as they are."""

import json
from pathlib import Path

import pytest
from fakes import SOLVED, make_task
from pydantic import SecretStr

from harbortrainer.trials import ModelEndpoint, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

LONG = "sk-7f3a9c1e5b"
VARIABLES = """
[verifier.env]
OPENAI_API_KEY = "${OPENAI_API_KEY}"
DEPLOY_TOKEN = "${DEPLOY_TOKEN}"
IS_AUTH = "false"
"""


@pytest.mark.parametrize("key", ["1", "0", "1.0", "reward", "9"])
async def test_short_key_leaves_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("DEPLOY_TOKEN", LONG)
    task = make_task(tmp_path / "task", test=f'echo "$DEPLOY_TOKEN $IS_AUTH"\n{SOLVED}', extra=VARIABLES)
    with (task / "solution" / "solve.sh").open("a") as solve:
        solve.write('echo "$OPENAI_API_KEY $SIGNING_KEY" > /app/keys\n')
    spec = TrialSpec(
        task_dir=task,
        trials_dir=tmp_path / "trials",
        environment_type="local",
        environment_kwargs={"image": "host"},
        trusted=True,
        agent="oracle",
        agent_env={"OPENAI_API_KEY": key, "SIGNING_KEY": LONG},
        keep_trials="all",
    )
    record = await run_trial(spec)
    assert record.reward == 1.0, record
    texts = {file.path: file.after for file in record.changed_files or []}
    assert texts["/app/keys"] == f"{key} [REDACTED]\n"
    (folder,) = (tmp_path / "trials").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert float((folder / "verifier" / "reward.txt").read_text()) == 1.0
    printed = (folder / "verifier" / "test-stdout.txt").read_text()
    assert printed.startswith("[REDACTED] false"), "a long secret is still redacted"


@pytest.mark.long
async def test_short_key_of_model_leaves_numbers(tmp_path: Path) -> None:
    """Our own redaction, for an agent whose key Harbor writes into files."""
    spec = TrialSpec(
        task_dir=make_task(tmp_path / "task"),
        trials_dir=tmp_path / "trials",
        environment_type="local",
        environment_kwargs={"image": "host"},
        agent="terminus-2",
        model=ModelEndpoint(name="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("1")),
        keep_trials="all",
    )
    await run_trial(spec)
    (folder,) = (tmp_path / "trials").iterdir()
    for file in folder.rglob("*.json"):
        json.loads(file.read_text())
        assert "[REDACTED]" not in file.read_text(), file
