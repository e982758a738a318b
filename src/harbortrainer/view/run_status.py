"""How a folder stands: finished, or somebody at work in it. Only reads: the lock itself is left alone."""

import json
import os
import tomllib
from datetime import datetime
from pathlib import Path

import psutil

from harbortrainer.runs.run_lock import LOCK_FILE
from harbortrainer.view.line_files import JsonLine


def at_work(folder: Path, lock: str = LOCK_FILE) -> bool:
    """Whether the process that the lock names lives on this machine, and lived when it took the lock."""
    try:
        said = json.loads((folder / lock).read_text(encoding="utf-8"))
        began = datetime.fromisoformat(said["started"]).timestamp()
        return said["host"] == os.uname().nodename and psutil.Process(said["pid"]).create_time() <= began + 1
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def json_file(path: Path) -> JsonLine:
    """A file that holds one JSON object; empty when it is not there, or half."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def toml_file(path: Path) -> JsonLine:
    """A TOML file; empty when it is not there or cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
