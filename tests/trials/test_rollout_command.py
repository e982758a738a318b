"""`harbortrainer rollout` shows a real trial as it runs, and lets nothing that a model wrote command the terminal."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import DONE, ScriptedModel, keys, make_task

from harbortrainer.cli import main
from harbortrainer.commands.narration import in_words, printable


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "tasks/answer", test='[ -f /app/answer ] && r=1 || r=0; echo "r is $r"; ' + REWARD)


REWARD = "echo $r > /logs/verifier/reward.txt"


@pytest.fixture
def scripted() -> Iterator[str]:
    """A model's server in a thread of its own: the command has an event loop itself."""
    import asyncio

    started, end = threading.Event(), None
    url: list[str] = []

    async def serve() -> None:
        nonlocal end
        end = asyncio.Event()
        async with ScriptedModel(
            [keys("echo from-the-$((1 + 1))nd-hand > /app/answer; cat /app/answer"), DONE, DONE]
        ).serve() as model:
            url.append(model.url)
            started.set()
            await end.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    yield url[0]
    assert end is not None
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


@pytest.mark.e2e
def test_a_trial_is_shown_turn_by_turn_with_its_end(
    task: Path, scripted: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--model", "m", "--base-url", scripted, "--max-turns", "5", "--keep", str(tmp_path / "kept")]
    assert main(["rollout", str(task), *words]) == 0
    said = capsys.readouterr().out
    parts = [
        "Create the file /app/answer",
        "--- terminal",
        "--- turn 1, model",
        "$ 'echo from-the",
        "from-the-2nd-hand",
    ]
    parts += [
        "--- turn 2, model",
        "says that the task is complete",
        "--- turn 3, model",
        "r is 1",
        "outcome   completed",
    ]
    parts += ["reward    1", "turns     3"]
    places = [said.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places, strict=True))
    assert "added     /app/answer (18 bytes)" in said
    assert list((tmp_path / "kept").glob("*/result.json"))


@pytest.mark.e2e
def test_an_agent_without_a_model_plays_too(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", str(task), "--agent", "oracle"]) == 0
    assert "reward    1" in capsys.readouterr().out
    assert main(["rollout", str(task), "--agent", "nop"]) == 0
    assert "reward    0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nobody to play; give --model M"),
        (["--agent", "oracle", "--model", "m"], "oracle asks no model"),
        (["--model", "m", "--base-url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--model", "./nowhere"], "./nowhere"),
    ],
)
def test_what_cannot_be_played_is_one_line(
    task: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["rollout", str(task), *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_several_tasks_are_not_one(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(task.parent / "other", test="true")
    assert main(["rollout", str(task.parent), "--agent", "nop"]) == 2
    assert f"name one: {task.parent}/answer" in capsys.readouterr().err


def test_what_a_model_wrote_commands_no_terminal() -> None:
    assert printable("a\x1b[2J\r\u009b5n\tb\n") == "a\\x1b[2J\\x0d\\x9b5n\tb\n"
    assert in_words("no json") == "no json" and in_words('["a list"]') == '["a list"]'
    assert "\x1b" not in in_words(keys("\x1b[2J"))
