"""`harbortrainer rollout` prints a real trial as it runs, with the model's output escaped."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import DONE, Reply, ScriptedModel, keys, make_task

from harbortrainer.cli import main
from harbortrainer.commands.rollout import format_answer, printable

pytestmark = pytest.mark.process  # trials in a local sandbox


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "tasks/answer", test='[ -f /app/answer ] && r=1 || r=0; echo "r is $r"; ' + REWARD)


REWARD = "echo $r > /logs/verifier/reward.txt"


SOLUTION = [keys("echo from-the-$((1 + 1))nd-hand > /app/answer; cat /app/answer"), DONE, DONE]


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[str]:
    """A model server in its own thread, because the command runs its own event loop. Its parameter is a script."""
    import asyncio

    started, end = threading.Event(), None
    url: list[str] = []

    async def serve() -> None:
        nonlocal end
        end = asyncio.Event()
        async with ScriptedModel(getattr(request, "param", SOLUTION)).serve() as model:
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
def test_rollout_prints_each_turn_and_the_result(
    task: Path, scripted: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model", "m", "--base-url", scripted, "--max-turns", "5", "--keep", str(tmp_path / "kept")]
    assert main(["rollout", str(task), *options]) == 0
    printed = capsys.readouterr().out
    parts = [
        "Create the file /app/answer",
        "--- terminal",
        "--- turn 1, model",
        "$ 'echo from-the",
        "from-the-2nd-hand",
    ]
    parts += [
        "--- turn 2, model",
        "(marks the task as complete)",
        "--- turn 3, model",
        "r is 1",
        "outcome   completed",
    ]
    parts += ["reward    1", "turns     3"]
    positions = [printed.find(part) for part in parts]
    assert -1 not in positions and positions == sorted(positions), dict(zip(parts, positions, strict=True))
    assert "added     /app/answer (18 bytes)" in printed
    assert list((tmp_path / "kept").glob("*/result.json"))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("scripted", "agent", "shown", "reward"),
    [
        (["echo 1 > /app/answer"], ["--agent", "plain"], "--- turn 1, model\necho 1 > /app/answer", 1),
        (
            [Reply(content="echo 1 > /app/answer\nThis wri", cut=True)],
            ["--agent", "plain"],
            "--- turn 1, model, cut at its length\necho 1",
            1,
        ),
        ([Reply(content="I thi", cut=True), *SOLUTION], [], "--- turn 1, model, cut at its length\nI thi", 1),
    ],
    ids=["plain", "plain, cut", "Terminus-2, cut"],
    indirect=["scripted"],
)
def test_rollout_shows_answers_of_each_agent(
    task: Path, scripted: str, agent: list[str], shown: str, reward: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", str(task), "--model", "m", "--base-url", scripted, *agent]) == 0
    printed = capsys.readouterr().out
    assert shown in printed and f"reward    {reward}" in printed, printed
    assert ("cut       1 answers at their length" in printed) == ("cut at" in shown)


@pytest.mark.e2e
def test_rollout_runs_agent_without_model(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", str(task), "--agent", "oracle"]) == 0
    assert "reward    1" in capsys.readouterr().out
    assert main(["rollout", str(task), "--agent", "nop"]) == 0
    assert "reward    0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "no model or agent given; pass --model MODEL"),
        (["--agent", "oracle", "--model", "m"], "oracle uses no model"),
        (["--model", "m", "--base-url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--model", "./nowhere"], "./nowhere"),
    ],
)
def test_invalid_rollout_arguments_give_one_line_error(
    task: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert main(["rollout", str(task), *options]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_rollout_refuses_several_tasks(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(task.parent / "other", test="true")
    assert main(["rollout", str(task.parent), "--agent", "nop"]) == 2
    assert f"pass one of them, e.g. {task.parent}/answer" in capsys.readouterr().err


def test_model_output_is_escaped_for_the_terminal() -> None:
    assert printable("a\x1b[2J\r\u009b5n\tb\n") == "a\\x1b[2J\\x0d\\x9b5n\tb\n"
    assert format_answer("no json") == "no json" and format_answer('["a list"]') == '["a list"]'
    assert "\x1b" not in format_answer(keys("\x1b[2J"))
