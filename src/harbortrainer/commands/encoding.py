"""Text encodings of the process: UTF-8 for files and names, escapes for output that a terminal cannot show."""

import locale
import os
import sys
from io import TextIOWrapper


def restart_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if the locale has another encoding.

    Harbor reads instructions in the locale's encoding: in Latin-1 the agent would get other text. Output keeps its
    encoding.
    """
    if sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8":
        return
    encoding = {"PYTHONIOENCODING": f"{sys.stdout.encoding}:backslashreplace"} if sys.stdout else {}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], encoding | os.environ | {"PYTHONUTF8": "1"})


def escape_unprintable() -> None:
    """Print signs that the encoding of the output lacks as escapes instead of raising `UnicodeEncodeError`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
