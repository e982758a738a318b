"""Format of the plain agent: its system prompts, and the command in an answer. Imports nothing."""

SYSTEM_PROMPT = "You are a Linux shell expert. Answer with one shell command and nothing else."
"""System prompt of a trial with one answer."""
LOOP_PROMPT = f"{SYSTEM_PROMPT} You get its output. When the task is done, answer with exit."
"""System prompt of a trial with several."""


def command_of(answer: str, *, cut: bool = False) -> str:
    """Return the command of an answer; "" if it has none.

    Args:
        answer: The answer, without thinking.
        cut: Whether it was cut at its length, so that its last line is not whole.
    """
    lines = answer.replace("\0", "").splitlines()  # a shell ignores NUL too, and no argument can have one
    whole = lines[:-1] if cut and not answer.endswith("\n") else lines
    commands = (_plain(line.strip().removeprefix("$ ")) for line in whole if not line.strip().startswith("```"))
    return next((command for command in commands if command), "")


def _plain(line: str) -> str:
    """Remove the backticks around a line. A command substitution at its beginning or end keeps its own."""
    substitutes = line.startswith("`") != line.endswith("`") and line.count("`") % 2 == 0
    return (line if substitutes else line.strip("`")).strip()
