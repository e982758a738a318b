"""Authentication of the requests to an environment server.

verifiers' server answers everyone who can connect to it. A request names a task folder, whose Dockerfile is built, a
model server, and an environment variable whose value is sent to that server. `HarborEnvironment` therefore checks each
request before anything is built or run:

- The run has a key (`RunKey`). The process that loads the tasks signs each of them, with the model servers that may
  be called for it. A server that knows the key refuses every other request.
- A server without a key (`rl` started by hand) refuses task folders outside its own source, and variables that could
  hold another service's key. It cannot tell who sends a request.

Invariant: the key is never sent, logged or passed to a trial. A signature only repeats a task of the run; it is removed
before the trial starts, so that no trace has it.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import named_folders

RUN_KEY_VARIABLE = "HARBORTRAINER_RUN_KEY"
"""Environment variable with the run's key, for servers on other machines and runs started by hand."""
RUN_KEY_FILE_VARIABLE = "HARBORTRAINER_RUN_KEY_FILE"
"""Environment variable with the path of the run's key file; takes precedence."""
RUN_KEY_FILE = ".run_key"
"""Name of the key file in the run folder."""

POLICY_KEY_VARIABLE = "VLLM_API_KEY"
"""Prime-RL's default variable for the key of the policy's server."""

_THIS_MACHINE = {"localhost", "127.0.0.1", "0.0.0.0", "::1"}
_MIN_CHARS = 16
_SHOWN_CHARS = 200


class RequestRefusedError(UserError):
    """A request to the environment server is not from the run."""


class ModelServer(BaseModel):
    """A model server that a run calls: its address, and the variable whose value is sent as its key."""

    base_url: str | None
    """None allows every address: Prime-RL chooses it on several nodes."""
    api_key_var: str


class Client(Protocol):
    """The parts of verifiers' client config that are checked."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key_var(self) -> str: ...


class Permit(BaseModel):
    """Proof that the run asks for a task with one of these model servers."""

    servers: list[ModelServer]
    """Allowed model servers; empty if the signing process does not know them."""
    signature: str
    """HMAC-SHA256 of task and servers with the run's key, in hexadecimal."""


class _KeyFile(BaseModel):
    key: str
    servers: list[ModelServer] = []


@dataclass(frozen=True, repr=False)
class RunKey:
    """The secret that the processes of one run share.

    Args:
        secret: The secret.
        servers: The model servers of the run; empty if they are not known yet.
    """

    secret: str
    servers: tuple[ModelServer, ...] = ()

    @classmethod
    def random(cls, servers: Iterable[ModelServer] = ()) -> Self:
        """Return a new random key."""
        return cls(secrets.token_hex(32), tuple(servers))

    @classmethod
    def create(cls, file: Path, servers: Iterable[ModelServer] = ()) -> Self:
        """Write a key file that only this user can read, and return the key.

        The secret is random, unless the environment variable of the key is set.

        Raises:
            UserError: The variable's value is too short.
        """
        given = _given()
        key = cls(given, tuple(servers)) if given else cls.random(servers)
        text = _KeyFile(key=key.secret, servers=list(key.servers)).model_dump_json()
        fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
        fresh.replace(file)
        return key

    @classmethod
    def of_process(cls) -> Self | None:
        """Return the key that this process was started with; None if there is none.

        Raises:
            UserError: The key file cannot be read, or the key is too short.
        """
        path = os.environ.get(RUN_KEY_FILE_VARIABLE)
        if not path:
            secret = _given()
            return cls(secret) if secret else None
        try:
            found = _KeyFile.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a key file"
            do = f"start the run again, or unset {RUN_KEY_FILE_VARIABLE}"
            raise UserError(f"cannot be read ({reason})", where=path, do=do) from None
        return cls(found.key, tuple(found.servers))

    @property
    def sampler_key(self) -> str:
        """Key of the run's own sampler."""
        return self._digest("sampler")

    @property
    def sampler_variable(self) -> str:
        """Variable with `sampler_key` in environment servers; unguessable, so that no `${...}` of a task names it."""
        return f"HARBORTRAINER_SAMPLER_KEY_{self._digest('variable')[:16].upper()}"

    def permit(self, task: Mapping[str, object], servers: Iterable[ModelServer] | None = None) -> Permit:
        """Sign a task.

        Args:
            task: The fields of the task that decide what is run.
            servers: The allowed model servers; None means the run's.
        """
        allowed = list(self.servers if servers is None else servers)
        return Permit(servers=allowed, signature=self._signature(task, allowed))

    def check(self, task: Mapping[str, object], permit: Permit | None, client: Client) -> None:
        """Check that the run asks for this task with this model server.

        Raises:
            RequestRefusedError: The task is not signed with this key, or the model server is not the run's.
        """
        if permit is None:
            raise _refused("the task is not signed with the run's key", _PASS_THE_KEY)
        if not hmac.compare_digest(permit.signature.encode(), self._signature(task, permit.servers).encode()):
            raise _refused("the task is signed with another key, or was changed", _PASS_THE_KEY)
        if not permit.servers:
            _check_variable(client)
        elif not any(_is_same(server, client) for server in permit.servers):
            raise _refused(
                f"the run has no model server {_shown(client.base_url)} with the key in {_shown(client.api_key_var)}",
                "send the base_url and the api_key_var of the run file",
            )

    def _signature(self, task: Mapping[str, object], servers: Iterable[ModelServer]) -> str:
        signed = {"task": dict(task), "servers": [server.model_dump() for server in servers]}
        return self._digest(json.dumps(signed, sort_keys=True))

    def _digest(self, text: str) -> str:
        return hmac.digest(self.secret.encode(), text.encode(), hashlib.sha256).hex()


_PASS_THE_KEY = f"start this server and the process that sends requests with the same {RUN_KEY_VARIABLE}"


def require_shared_key() -> None:
    """Check that the environment has a run key, which this machine shares with another one.

    Raises:
        UserError: The variable is not set, or its value is too short.
    """
    if not _given():
        do = f"export {RUN_KEY_VARIABLE} with the same value on both machines; make one with `openssl rand -hex 32`"
        raise UserError("is not set: the machines of a run have no common key", where=f"${RUN_KEY_VARIABLE}", do=do)


def check_unsigned(task_dir: Path, folder: Path, client: Client) -> None:
    """Check a request to a server that has no key.

    Args:
        task_dir: The task's folder.
        folder: Folder with the tasks of the server's source.
        client: The model server.

    Raises:
        RequestRefusedError: The task is outside the folder, or the variable may hold another service's key.
    """
    real = task_dir.resolve()
    # A task of the folder may be a link, and requests name its target.
    if not real.is_relative_to(folder.resolve()) and real not in (
        task.resolve() for task in named_folders(folder).values()
    ):
        raise _refused(
            f"the task folder {_shown(str(task_dir))} is not in {folder}, the tasks of this server", _PASS_THE_KEY
        )
    _check_variable(client)


def _check_variable(client: Client) -> None:
    """Refuse a variable that may hold another service's key, if the run's model servers are not known."""
    if client.api_key_var != POLICY_KEY_VARIABLE and os.environ.get(client.api_key_var):
        raise _refused(
            f"api_key_var is {_shown(client.api_key_var)}, and this server does not know the run file",
            f"put the key into {POLICY_KEY_VARIABLE}, or start the run with `harbortrainer train`",
        )


def _refused(what: str, do: str) -> RequestRefusedError:
    return RequestRefusedError(what, where="request refused", do=do)


def _is_same(server: ModelServer, client: Client) -> bool:
    same_url = server.base_url is None or _normalized(server.base_url) == _normalized(client.base_url)
    return same_url and server.api_key_var == client.api_key_var


def _normalized(url: str) -> tuple[str, str, int | None, str]:
    """Return the parts of a URL, with one name for this machine, which Prime-RL spells in several ways."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", url, None, ""
    return parts.scheme, "localhost" if host in _THIS_MACHINE else host, port, parts.path.rstrip("/")


def _shown(text: str) -> str:
    """Quote a text of an unknown sender for one line of a log."""
    return ascii(text[:_SHOWN_CHARS])


def _given() -> str:
    """Return the key in the environment variable, "" if it is not set."""
    given = os.environ.get(RUN_KEY_VARIABLE, "")
    if given and len(given) < _MIN_CHARS:
        do = f"export {RUN_KEY_VARIABLE}=$(openssl rand -hex 32)"
        raise UserError(f"has fewer than {_MIN_CHARS} characters", where=f"${RUN_KEY_VARIABLE}", do=do)
    return given
