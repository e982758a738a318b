"""Candidates of an evaluation: a local model, a model behind an endpoint, or an agent without a model.

Contract: creating a candidate and `check` are cheap, and raise `UserError` for a candidate that cannot be evaluated.
`serve` serves it during a block. Nothing here imports torch or verifiers before that.

`probe` sends a model's server one small request, and raises `UserError` unless it returns a chat completion. It
requests neither log-probabilities nor token ids, since an evaluation needs none.
"""

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx
from pydantic import ValidationError

from harbortrainer.engines.engine_choice import require_bitsandbytes
from harbortrainer.environment.request_check import RunKey
from harbortrainer.errors import UserError
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.runs.memory import frozen_gc
from harbortrainer.runs.provenance import fetched_fingerprints, model_fingerprints

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from verifiers.v1.clients import ClientConfig

CONNECT_S = 10.0
ANSWER_S = 120.0
"""Longest wait for a one-word answer; a server that is loading weights may be slow."""
TOKENS = 64


def probe(base_url: str, model: str, *, key: str, key_var: str, answer_s: float = ANSWER_S) -> None:
    """Request a one-word completion.

    Args:
        base_url: URL of the server, with its /v1.
        model: Name of the model at the server.
        key: API key.
        key_var: Variable that holds the key, for the message.
        answer_s: Timeout of the answer in seconds.

    Raises:
        UserError: The server does not answer, or does not return a chat completion.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    try:
        reply = asyncio.run(_ask(url, model, key, answer_s))
    except TimeoutError:
        what = f"accepted the request but did not finish its answer within {answer_s:g} s"
        raise UserError(what, where=url, do="check that the server is up and has loaded the model") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
        raise UserError(what, where=url, do="start the server, or correct --base-url") from None
    _read(reply, url, model, key_var)


async def _ask(url: str, model: str, key: str, answer_s: float) -> httpx.Response:
    """Send the request; the timeout covers the whole reply, since a server can send it slowly for ever."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say yes."}]}
    waits, headers = httpx.Timeout(None, connect=CONNECT_S), {"Authorization": f"Bearer {key}"}
    async with (
        asyncio.timeout(answer_s),
        httpx.AsyncClient(timeout=waits, trust_env=url.startswith("https:"), headers=headers) as http,
    ):
        reply = await http.post(url, json=body | {"max_tokens": TOKENS})
        if reply.status_code == 400 and "max_tokens" in reply.text:  # newer servers use another name
            reply = await http.post(url, json=body)
        return reply


def _read(reply: httpx.Response, url: str, model: str, key_var: str) -> None:
    from harbortrainer.trials.tokens import ChatCompletion

    text = " ".join(reply.text.split())[:200]
    if reply.status_code in (401, 403):
        what = f"rejects the key ({reply.status_code}: {text})"
        raise UserError(
            what, where=url, do=f"put the right key into ${key_var}, or pass another variable with --api-key-var"
        )
    if reply.status_code == 404:
        do = "correct --model, or --base-url (it ends in /v1)"
        raise UserError(f"has no model {model!r} ({text})", where=url, do=do)
    if not reply.is_success:
        raise UserError(f"answers {reply.status_code}: {text}", where=url, do="fix the server and try again")
    try:
        ChatCompletion.model_validate_json(reply.content)
    except ValidationError:
        what = f"returned an invalid chat completion ({text or 'empty'})"
        raise UserError(what, where=url, do="pass the /v1 URL of an OpenAI-compatible server as --base-url") from None


MODEL_FREE_AGENTS = ("oracle", "nop")
"""Harbor's agents that need no model."""
UNUSED_URL = "http://127.0.0.1:9/v1"


@dataclass(frozen=True)
class ServedModel:
    """A candidate that is being served."""

    client: "ClientConfig"
    """verifiers' client config of the server."""
    model: str
    """Name of the model at the server."""
    api_key: str = "EMPTY"
    """Key of the server."""
    seeded: bool = False
    """Whether requests have a seed."""
    release: Callable[[str], object] = lambda session: None
    """Called with each trace's id when its trial has ended, to release its data."""


class Candidate(Protocol):
    """A policy that can be evaluated."""

    @property
    def name(self) -> str: ...
    def identity(self) -> dict[str, str]: ...
    def check(self) -> None: ...
    def serve(self, rules: EvalRules, key: RunKey) -> "AbstractContextManager[ServedModel]": ...


@dataclass(frozen=True)
class NoModel:
    """A Harbor agent that needs no model."""

    name: str

    def identity(self) -> dict[str, str]:
        """Return the agent's name."""
        return {"agent": self.name}

    def check(self) -> None:
        """Check nothing."""

    @contextmanager
    def serve(self, rules: EvalRules, key: RunKey) -> Generator[ServedModel]:
        """Serve nothing."""
        from verifiers.v1.clients import EvalClientConfig

        yield ServedModel(EvalClientConfig(base_url=UNUSED_URL, api_key_var="HARBORTRAINER_NO_KEY"), "none")


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server."""

    base_url: str
    """URL of the server, with its /v1."""
    name: str
    key_var: str
    """Variable that holds the key; if it is not set, "EMPTY" is sent, which local servers accept."""

    def identity(self) -> dict[str, str]:
        """Return server and model name; the weights are unknown."""
        return {"base_url": self.base_url, "model": self.name}

    def check(self) -> None:
        """Raise `UserError` unless the server answers a request."""
        probe(self.base_url, self.name, key=os.environ.get(self.key_var) or "EMPTY", key_var=self.key_var)

    @contextmanager
    def serve(self, rules: EvalRules, key: RunKey) -> Generator[ServedModel]:
        """Yield a client that relays calls, as in Prime-RL's evaluations."""
        from verifiers.v1.clients import EvalClientConfig

        client = EvalClientConfig(base_url=self.base_url, api_key_var=self.key_var)
        yield ServedModel(client, self.name, api_key=os.environ.get(self.key_var) or "EMPTY")


@dataclass(frozen=True)
class LocalModel:
    """A model, with or without an adapter, that the embedded sampler serves."""

    files: PolicyFiles

    @property
    def name(self) -> str:
        """Names of base and adapter."""
        return str(self.files)

    def identity(self) -> dict[str, str]:
        """Return the fingerprints of the files that affect the output; a hub model's name if its commit is unknown."""
        base = fetched_fingerprints(self.files.base) or {"model": self.files.base}
        own = {f"base {name}": digest for name, digest in base.items()}
        adapter = self.files.adapter
        own |= {"base": self.files.quantization} if self.files.quantization else {}
        return own | ({f"adapter {n}": d for n, d in model_fingerprints(str(adapter)).items()} if adapter else {})

    def check(self) -> None:
        """Raise `UserError` for a quantized base without its library; the trials report a failing sampler."""
        if self.files.quantization is not None:
            require_bitsandbytes()

    @contextmanager
    def serve(self, rules: EvalRules, key: RunKey) -> Generator[ServedModel]:
        """Serve the model with the endpoint, client and chat format of training; requests need `key`'s sampler key."""
        from pydantic import TypeAdapter
        from renderers import RendererConfig
        from verifiers.v1.clients import TrainClientConfig

        from harbortrainer.engines.local.sampler import Sampler

        base = self.files.base
        with Sampler(
            base,
            max_model_len=rules.max_model_len,
            seed=rules.seed,
            dtype=rules.dtype,
            quantization=self.files.quantization or rules.quantization,
            api_key=key.sampler_key,
        ) as sampler:
            self.files.load_adapter(sampler)
            client = TrainClientConfig(
                base_url=f"{sampler.url}/v1",
                api_key_var=key.sampler_variable,
                renderer=TypeAdapter(RendererConfig).validate_python(rules.renderer),
                renderer_model_name=base,
            )
            with frozen_gc():
                yield ServedModel(
                    client, base, api_key=sampler.api_key, seeded=True, release=sampler.completion_log.pop
                )


def choose_candidate(*, model: str | None, base_url: str | None, agent: str | None, key_var: str) -> Candidate:
    """Return the candidate that the command line options select.

    Raises:
        UserError: The options select nothing, contradict each other, or name a missing model.
    """
    if agent in MODEL_FREE_AGENTS:
        if model or base_url:
            what = f"{agent} uses no model"
            raise UserError(what, where="--agent", do="remove --model and --base-url")
        return NoModel(agent)
    if model is None:
        do = "pass --model M, --base-url URL --model NAME, or --agent oracle"
        raise UserError("no model or agent given", where="harbortrainer eval", do=do)
    if base_url is not None:
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"{base_url!r} is not a URL", where="--base-url", do="write http://HOST:PORT/v1")
        return Endpoint(base_url.rstrip("/"), model, key_var)
    return LocalModel(PolicyFiles.find(model))
