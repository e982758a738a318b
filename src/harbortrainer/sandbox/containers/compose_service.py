"""What the compose files of a task without sidecars say, as the daemon's own API wants it.

Contract: a file that says anything beyond what is translated here is none of ours, and Compose starts the task then. So
nothing that Harbor or a user asks for is ever left out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

COMMAND = ["sh", "-c", "sleep infinity"]
"""What Harbor's compose files let every main service do."""
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MOUNT_KEYS = {"type", "source", "target", "read_only"}


class NotTranslatedError(Exception):
    """A compose file says something that is not translated."""


def main_service(files: Sequence[Path]) -> dict:
    """The main service as the files, which are JSON, say together; a later one wins, tables are merged.

    Raises:
        NotTranslatedError: There is another service, or anything beside services.
    """
    merged: dict = {}
    for path in files:
        text = path.read_text()
        if path.suffix != ".json" or "$" in text:
            raise NotTranslatedError(f"{path.name} is not Harbor's, or asks for variables")
        said = json.loads(text)
        if set(said) != {"services"} or set(said["services"]) != {"main"}:
            raise NotTranslatedError(f"{path.name} says more than services.main")
        for key, value in said["services"]["main"].items():
            before = merged.get(key)
            merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def container_config(service: dict) -> dict:
    """The body of the daemon's `containers/create`, without an image and a network.

    Raises:
        NotTranslatedError: The service says something that is not translated.
    """
    host: dict = {}
    config: dict = {"Cmd": COMMAND, "HostConfig": host}
    for key, value in service.items():
        match key, value:
            case ("build" | "image", _):
                continue  # who builds or pulls it has done so
            case "environment", dict():
                config["Env"] = [f"{name}={text}" for name, text in value.items()]
            case "labels", dict():
                config["Labels"] = value
            case "stop_grace_period", "0s":
                config["StopTimeout"] = 0
            case "volumes", list():
                host["Mounts"] = [_mount(volume) for volume in value]
            case "init", bool():
                host["Init"] = value
            case "extra_hosts", list():
                host["ExtraHosts"] = value
            case "cpus", int() | float():
                host["NanoCpus"] = int(value * 1e9)
            case "pids_limit", int():
                host["PidsLimit"] = value
            case "mem_limit", str():
                host["Memory"] = _bytes(value)
            case _:
                raise NotTranslatedError(f"{key}: {value}")
    return config


def _mount(volume: dict) -> dict:
    source, target = str(volume.get("source")), str(volume.get("target"))
    if set(volume) - _MOUNT_KEYS or volume.get("type") != "bind" or not Path(source).is_absolute():
        raise NotTranslatedError(f"volumes: {volume}")
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": bool(volume.get("read_only"))}


def _bytes(text: str) -> int:
    number, unit = text[:-1], text[-1:].lower()
    if unit not in _UNITS or not number.isdecimal():
        raise NotTranslatedError(f"mem_limit: {text}")
    return int(number) * _UNITS[unit]
