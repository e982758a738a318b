"""A line to a tmux server for as long as its session lives: keys in, screens out, without a process for each.

tmux's control mode (`tmux -C`): commands are read line by line, and each is answered in a block between `%begin` and
`%end` or `%error`. What a pane shows may look like such lines: a mark that nobody can know before follows each answer.
"""

import itertools
import re
import secrets
import shlex

from harbortrainer.sandbox.conversation import Conversation

_UNQUOTABLE = {"'": '"\'"', "\n": '"\\n"', "\r": '"\\r"'}
_BELOW_A_SHELL = {"SHLVL": "1"}  # as if the command had been run by one: it is seen in the session
_LOGIN_SHELL, _PANE_LOG = "bash --login", "cat > "
# Without what the pane writes as it comes; and a terminal of no size, whose size does not count.
_ATTACHED_AS = "no-output,ignore-size"


def control_command(start: str, name: str, history: int) -> tuple[list[str], dict[str, str]]:
    """The program and the variables that start a session and stay on the line.

    Args:
        start: The shell command that starts it: `export A=b && ... && tmux new-session ...`.
        name: The session's.
        history: Lines of the buffers of windows to come.
    """
    *exports, command = _commands(shlex.split(start))
    variables = _BELOW_A_SHELL | dict(words[1].split("=", 1) for words in exports)
    argv = [command[0], "-C"]
    for word in command[1:]:
        if word == _LOGIN_SHELL:
            argv += word.split()  # as words it is started as it is, as one by a shell of its own
        else:
            argv.append(f"exec {word}" if word.startswith(_PANE_LOG) else word)
    argv += [";", "set-option", "-g", "history-limit", str(history)]
    return [*argv, ";", "attach-session", "-t", name, "-f", _ATTACHED_AS], variables


def _commands(words: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return found


class ControlLine:
    """The line to the session called `name`. What it asks raises ConversationOverError when it is cut."""

    def __init__(self, conversation: Conversation, name: str) -> None:
        self._conversation, self._name = conversation, name

    async def type(self, keys: str) -> bool:
        """Type; False when they were not typed, since tmux refused them."""
        if keys.endswith(";"):
            return False  # as a program's last argument it ends a command of tmux's, here it would be typed
        (answer,) = await self._ask(f"send-keys -t {self._name} -- {quoted(keys)}")
        return answer is not None

    async def look(self) -> tuple[str, str] | None:
        """The whole buffer and the visible screen; None when tmux refuses."""
        target = f"-t {self._name}"
        buffer, screen = await self._ask(f"capture-pane -p -S - {target}", f"capture-pane -p {target}")
        return None if buffer is None or screen is None else (buffer, screen)

    async def _ask(self, *commands: str) -> list[str | None]:
        """The answer to each command; None for one that failed and for those after it."""
        mark = secrets.token_hex(16)
        marks = [f"{mark}{number}" for number in range(len(commands) + 1)]
        said = [f"{command} ; display-message -p {after}" for command, after in zip(commands, marks[1:], strict=True)]
        # One line, so that nothing comes in between; the last mark again, as an error ends its line.
        lines = f"display-message -p {marks[0]}\n{' ; '.join(said)}\ndisplay-message -p {mark}\n"
        answer = await self._conversation.ask(lines.encode(), f"\n{mark}\n%end ".encode())
        return [_block(answer, *pair) for pair in itertools.pairwise(marks)]


def quoted(keys: str) -> str:
    """`keys` as one word of a line that tmux reads."""
    return "'" + re.sub("['\n\r]", lambda found: f"'{_UNQUOTABLE[found[0]]}'", keys) + "'"


def _block(answer: bytes, before: str, after: str) -> str | None:
    """What is in the block between two marks."""
    _, found, rest = answer.partition(f"\n{before}\n%end ".encode())
    inside, followed, _ = rest.partition(f"\n{after}\n%end ".encode())
    begin = re.search(rb"^%begin (.*)\n", inside, re.MULTILINE)
    if not found or not followed or begin is None:
        return None
    end = inside.rfind(b"%end " + begin[1] + b"\n")
    return inside[begin.end() : end].decode(errors="replace") if end >= begin.end() else None
