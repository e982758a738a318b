"""Shorten the output of a failed image build or command, so that its end still shows the cause.

Builders repeat the whole instruction after the cause. A long RUN would then fill the part of the message that is kept.
The functions are pure: text in, text out.
"""

import re

_MAX_CHARS = 100
_ELLIPSIS = " ..."
_STEP = re.compile(r"^(?P<before>(?:STEP|Step) \d+/\d+ ?: )(?P<step>.+)(?P<after>)$", re.M)
"""A step as buildah, podman and Docker's legacy builder announce it."""
_BUILDAH = 'building at STEP "'
_INSTRUCTIONS = (
    _STEP,
    re.compile(rf'(?P<before>{_BUILDAH})(?P<step>(?s:.+?))(?P<after>":)'),
    re.compile(
        r"(?P<before>The command ')(?P<step>(?s:.+?))(?P<after>' returned a non-zero code)"
    ),  # Docker's legacy builder
    re.compile(r"^(?P<before> ?> \[[^\]]*\d+/\d+\] )(?P<step>.+)(?P<after>:)$", re.M),  # BuildKit prints it three times
    re.compile(r'(?P<before>process ")(?P<step>(?s:.+?))(?P<after>" did not complete successfully)'),
)
_SOURCE_EXCERPT = re.compile(r"^\S+:\d+\n-{20}\n(?: *\d+ \|.*\n)+-{20}\n", re.M)
_EXIT_CODES = re.compile(r"^(?:subprocess exited with status \d+\n)+", re.M)
"""Exit codes of buildah's own processes; the code of the command follows."""


def shorten_instructions(text: str) -> str:
    """Cut each instruction in a builder's output to its first 100 characters.

    Example:
        >>> shorten_instructions('no room\\nError: building at STEP "RUN true": exit status 1')
        'no room\\nError: building at STEP "RUN true": exit status 1'
    """
    for step in {found["step"] for found in _STEP.finditer(text)}:  # exact text, since a step may contain quotes
        text = text.replace(f'{_BUILDAH}{step}"', f'{_BUILDAH}{_cut(step)}"')
    for instruction in _INSTRUCTIONS:
        text = instruction.sub(_cut_step, text)
    return _EXIT_CODES.sub("", _SOURCE_EXCERPT.sub("", text))


def whole_end(text: str, limit: int) -> str:
    """Return the end of a text, at most `limit` characters: its last whole lines, or words where a line is long.

    At least half of the characters are kept, so a very long word is cut.

    Example:
        >>> whole_end("first line\\nsecond line", 15), whole_end("one long line", 9)
        ('second line', 'long line')
    """
    if len(text) <= limit:
        return text
    end, most = text[-limit - 1 :], limit // 2
    cut = end.find("\n", 0, most)
    if cut < 0:
        cut = end.find(" ", 0, most)
    return end[max(0, cut) + 1 :]


def whole_beginning(text: str, limit: int) -> str:
    """Return the beginning of a text, at most `limit` characters, cut as `whole_end` cuts."""
    if len(text) <= limit:
        return text
    start, least = text[: limit + 1], limit // 2
    cut = start.rfind("\n", least)
    if cut < 0:
        cut = start.rfind(" ", least)
    return text[: cut if cut >= 0 else limit]


def _cut_step(found: re.Match[str]) -> str:
    return f"{found['before']}{_cut(found['step'])}{found['after']}"


def _cut(step: str) -> str:
    return step if len(step) <= _MAX_CHARS or step.endswith(_ELLIPSIS) else step[:_MAX_CHARS] + _ELLIPSIS
