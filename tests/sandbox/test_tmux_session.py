"""Terminals in tmux's control mode show the same output as those that run a command per capture. Uses real tmux."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath
from typing import Any, cast

import pytest
from harbor.environments.base import ExecResult

from harbortrainer.trials.tmux_session import SOCKET_ENV, FastTmuxSession, control_command, quoted

WAIT_S = 0.4
TYPED_KEYS = {
    "a command": ["echo 42 > /tmp/answer; ls -la /tmp/answer | cut -c1-10\n"],
    "quotes": ["echo 'a' \"b\" `echo c` $((1+1)) \\$x\n"],
    "letters": ["echo ü→🎉 é\n", "printf '\\303\\050\\n'\n"],
    "several lines": ["cat > /tmp/f <<'X'\none\n  two\t'2'\nX\ncat -A /tmp/f\n"],
    "key names": ["echo cut", "C-c", "echo on", "Enter"],
    "a control character": ["cat\n", "\x03", "echo $?\r"],
    "tmux special characters": ["echo '#{pane_id} %1 {x} ~ # ; $HOME'\n", "echo a ;", " echo b\n", "echo \\;", "\n"],
    "more than the screen": ["seq 1 300\n", "clear\n", "echo here\n"],
    "control protocol lines": ["printf '%%end 1 2 1\\n%%begin 1 2 1\\n%%error 1 2 1\\n%%exit\\n'\n"],
    "nothing": [""],
}


class CommandSession(FastTmuxSession):
    """Session without control mode: each capture runs a command."""

    async def _start_in_control_mode(self) -> bool:
        return False


class ControlOnlySession(FastTmuxSession):
    """Session that fails if it runs a command."""

    async def run_inside(self, command: str) -> ExecResult:
        raise AssertionError(f"a command was run: {command}")


@pytest.fixture
def open_terminal(make_sandbox) -> Callable[..., Awaitable[FastTmuxSession]]:
    """Return a function that starts a terminal in a new sandbox: `await open_terminal(kind)`."""

    async def open_one(kind: type[FastTmuxSession], **extra: Any) -> FastTmuxSession:
        sandbox = await make_sandbox(env=SOCKET_ENV)
        await sandbox.exec("rm -f /root/.bashrc /root/.profile; echo \"PS1='$ '\" > /root/.bash_profile")
        terminal = kind("t", sandbox, PurePosixPath("/logs/agent/t.pane"), None, None, **extra)
        await terminal.start()
        return terminal

    return open_one


async def wait_for_prompt(terminal: FastTmuxSession) -> None:
    """Wait for the shell's first prompt."""
    for _ in range(200):
        if "$" in await terminal.capture_pane():
            return
        await asyncio.sleep(0.05)
    pytest.fail("no prompt within 10 s")


@pytest.mark.parametrize("case", TYPED_KEYS)
async def test_control_mode_and_commands_show_same_output(open_terminal, case: str):
    outputs = []
    for kind in (CommandSession, FastTmuxSession):
        terminal = await open_terminal(kind)
        await wait_for_prompt(terminal)
        captures = [await terminal.get_incremental_output()]
        captures += [await terminal.type_and_capture(keys, WAIT_S) for keys in TYPED_KEYS[case]]
        outputs.append([*captures, await terminal.get_incremental_output(), await terminal.is_session_alive()])
    assert outputs[0] == outputs[1]


async def test_turn_in_control_mode_runs_no_command(open_terminal):
    terminal = await open_terminal(ControlOnlySession)
    assert "\n$\n" in await terminal.get_incremental_output()
    assert "\nhere\n" in await terminal.type_and_capture("echo here\n", WAIT_S)
    await terminal.type_and_wait("echo there\n", WAIT_S)
    assert "\nthere\n" in await terminal.get_incremental_output()


async def test_shell_has_same_variables_in_both_modes(open_terminal):
    environments = []
    for kind in (CommandSession, FastTmuxSession):
        terminal = await open_terminal(kind, extra_env={"A": "x y"})
        await terminal.type_and_wait("env | sort > /tmp/env; echo $- $0 >> /tmp/env\n", WAIT_S)
        lines = (await terminal.environment.exec("cat /tmp/env")).stdout.splitlines()
        environments.append([line for line in lines if not line.startswith("TMUX=")])
    assert environments[0] == environments[1]
    assert "A=x y" in environments[0]


async def test_pane_output_is_logged(open_terminal):
    terminal = await open_terminal(FastTmuxSession)
    await terminal.type_and_capture("echo logged\n", WAIT_S)
    assert (await terminal.environment.exec("cat /logs/agent/t.pane")).stdout.count("logged\r\n") == 2


@pytest.mark.parametrize("command", ["tmux detach-client -s t\n", "kill $(tmux list-clients -F '#{client_pid}')\n"])
async def test_falls_back_to_commands_if_control_client_ends(open_terminal, command: str):
    terminal = await open_terminal(FastTmuxSession)
    await terminal.type_and_capture(command, WAIT_S)
    assert "\nstill here\n" in await terminal.type_and_capture("echo still here\n", WAIT_S)
    assert await terminal.is_session_alive()


async def test_other_user_cannot_type_through_control_client(open_terminal):
    terminal = await open_terminal(FastTmuxSession)
    await terminal.get_incremental_output()
    terminal.environment.default_user = "games"
    with pytest.raises(RuntimeError):
        await terminal.type_and_capture("id -un > /tmp/typed\n", WAIT_S)
    terminal.environment.default_user = None
    assert (await terminal.environment.exec("cat /tmp/typed")).return_code != 0
    assert "root" in await terminal.type_and_capture("id -un\n", WAIT_S)


async def test_typing_into_closed_terminal_raises(open_terminal):
    terminal = await open_terminal(FastTmuxSession)
    await terminal.type_and_capture("exit\n", WAIT_S)
    while await terminal.is_session_alive():
        await terminal.get_incremental_output()
    with pytest.raises(RuntimeError, match="failed to send"):
        await terminal.type_and_capture("echo more\n", WAIT_S)


async def test_cancelled_capture_does_not_affect_next_one(open_terminal):
    terminal = await open_terminal(FastTmuxSession)
    for event_loop_steps in range(20):
        capture = asyncio.create_task(terminal.get_incremental_output())
        for _ in range(event_loop_steps):
            await asyncio.sleep(0)
        capture.cancel()
    assert "\nright\n" in await terminal.type_and_capture("echo right\n", WAIT_S)


async def test_without_tmux_control_mode_is_not_started(make_sandbox):
    sandbox = await make_sandbox(env={"PATH": "/nothing"})
    terminal = FastTmuxSession("t", sandbox, PurePosixPath("/logs/agent/t.pane"), None, None)
    assert not await terminal._start_in_control_mode()


def test_control_command_equals_harbors_start_command():
    no_environment = cast("Any", None)
    terminal = FastTmuxSession("t", no_environment, PurePosixPath("/logs/pane"), None, None, extra_env={"A": "1 && 2"})
    argv, variables = control_command(terminal.start_command, "t", 9)
    assert variables == {"SHLVL": "1", "TERM": "xterm-256color", "SHELL": "/bin/bash"}
    assert argv[:4] == ["tmux", "-C", "new-session", "-e"]
    assert "|".join(argv[4:]) == (
        "A=1 && 2|-x|160|-y|40|-d|-s|t|bash|--login|;|pipe-pane|-t|t|exec cat > /logs/pane|;"
        "|set-option|-g|history-limit|9|;|attach-session|-t|t|-f|no-output,ignore-size"
    )


def test_quotes_keys_for_tmux_command():
    assert quoted("a'b\nc\r") == "'a'\"'\"'b'\"\\n\"'c'\"\\r\"''"
