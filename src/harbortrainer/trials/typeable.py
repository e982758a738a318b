"""Answers that cannot be typed are malformed answers: the model is told so, as Terminus-2 tells of broken JSON.

Whatever a model writes, its trial goes on. Harbor's parsers let through what fails later, in the terminal or on the
way to disk (NUL characters, halves of surrogate pairs, a wait that is no number), and raise on some texts (numbers of
thousands of digits, nesting without end): an answer like that would end the trial as an error that does not train.

Invariant: `parse_response` never raises, and what it returns without an error can be typed and written down.
"""

import math
import re
from dataclasses import replace

from harbor.agents.terminus_2.terminus_json_plain_parser import ParsedCommand, ParseResult

from harbortrainer.harbor_side.terminus import AnswerParser

_SURROGATE = re.compile("[\ud800-\udfff]")
_RAISED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


class TypeableParser:
    """Harbor's parser, which refuses what cannot be typed. What else the parser has is the parser's own."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def __getattr__(self, name: str) -> object:
        return getattr(self._parser, name)

    def parse_response(self, response: str) -> ParseResult:
        """The commands of an answer; without any, and with an error in words, when one of them cannot be typed."""
        try:
            result = self._parser.parse_response(response)
        except _RAISED as error:
            reason = " ".join(_clean(error).split())[:200]
            return ParseResult([], False, f"The response cannot be read: {type(error).__name__}: {reason}", "")
        said = {name: _clean(getattr(result, name)) for name in ("error", "warning", "analysis", "plan")}
        result = replace(result, **said)
        faults = [fault for i, command in enumerate(result.commands, 1) if (fault := _fault(i, command))]
        return replace(result, commands=[], is_task_complete=False, error="; ".join(faults)) if faults else result


def _clean(text: object) -> str:
    return _SURROGATE.sub("\ufffd", str(text))


def _fault(number: int, command: ParsedCommand) -> str:
    if "\0" in command.keystrokes:
        return f"Command {number} 'keystrokes' contain a NUL character (\\u0000), which cannot be typed"
    if found := _SURROGATE.search(command.keystrokes):
        half = f"\\u{ord(found.group()):04x}"
        return f"Command {number} 'keystrokes' contain half of a surrogate pair ({half}), which cannot be typed"
    if not math.isfinite(command.duration):
        return f"Command {number} 'duration' is not a finite number"
    return ""
