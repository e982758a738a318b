"""What is evaluated: a model that is served here, a model behind an endpoint, or an agent that needs none.

Contract: making a candidate and `check` are cheap and raise `UserError` for what cannot be; `serve` holds it ready for
the length of a block. Nothing here imports torch or verifiers before `serve`.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harbortrainer.engines.engine_choice import need_bitsandbytes
from harbortrainer.errors import UserError
from harbortrainer.evaluation.endpoint_probe import probe
from harbortrainer.evaluation.play_rules import PlayRules
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.runs.ingredients import weights_of
from harbortrainer.runs.memory import imports_left_alone

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from verifiers.v1.clients import ClientConfig

WITHOUT_MODEL = ("oracle", "nop")
"""Harbor's agents that ask no model."""
NOWHERE = "http://127.0.0.1:9/v1"


@dataclass(frozen=True)
class Served:
    """A candidate that can be asked."""

    client: "ClientConfig"
    """Where, as verifiers reads it."""
    model: str
    """Under which name."""
    seeded: bool = False
    """Whether requests carry a seed of ours."""
    forget: Callable[[str], object] = lambda session: None
    """Told each trace's id when its trial is over."""


class Candidate(Protocol):
    """What is evaluated."""

    @property
    def name(self) -> str: ...
    def identity(self) -> dict[str, str]: ...
    def check(self) -> None: ...
    def serve(self, rules: PlayRules) -> "AbstractContextManager[Served]": ...


@dataclass(frozen=True)
class NoModel:
    """An agent of Harbor's that needs no model."""

    name: str

    def identity(self) -> dict[str, str]:
        """The agent's name."""
        return {"agent": self.name}

    def check(self) -> None:
        """There is nothing that could be down."""

    @contextmanager
    def serve(self, rules: PlayRules) -> Generator[Served]:
        """Nothing is served."""
        from verifiers.v1.clients import EvalClientConfig

        yield Served(EvalClientConfig(base_url=NOWHERE, api_key_var="HARBORTRAINER_NO_KEY"), "none")


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server."""

    base_url: str
    """With its /v1."""
    name: str
    key_var: str
    """Variable that holds the key; one that is not set sends "EMPTY", as local servers take it."""

    def identity(self) -> dict[str, str]:
        """Server and name; nobody knows which weights."""
        return {"base_url": self.base_url, "model": self.name}

    def check(self) -> None:
        """Raise `UserError` unless the server answers a question."""
        probe(self.base_url, self.name, key=os.environ.get(self.key_var) or "EMPTY", key_var=self.key_var)

    @contextmanager
    def serve(self, rules: PlayRules) -> Generator[Served]:
        """Relayed calls, as Prime-RL's evaluations make them."""
        from verifiers.v1.clients import EvalClientConfig

        yield Served(EvalClientConfig(base_url=self.base_url, api_key_var=self.key_var), self.name)


@dataclass(frozen=True)
class LocalModel:
    """A model that the embedded sampler serves, with an adapter on top where there is one."""

    files: PolicyFiles

    @property
    def name(self) -> str:
        """Base and adapter."""
        return str(self.files)

    def identity(self) -> dict[str, str]:
        """Fingerprints of the files that decide what it computes."""
        own = {f"base {name}": digest for name, digest in weights_of(self.files.base).items()}
        adapter = self.files.adapter
        own |= {"base": self.files.quantization} if self.files.quantization else {}
        return own | ({f"adapter {n}": d for n, d in weights_of(str(adapter)).items()} if adapter else {})

    def check(self) -> None:
        """Raise `UserError` for a quantized base without its library; when the sampler fails, the trials say so."""
        if self.files.quantization is not None:
            need_bitsandbytes()

    @contextmanager
    def serve(self, rules: PlayRules) -> Generator[Served]:
        """The same endpoint, client and chat format as in training."""
        from pydantic import TypeAdapter
        from renderers import RendererConfig
        from transformers.utils.logging import disable_progress_bar
        from verifiers.v1.clients import TrainClientConfig

        from harbortrainer.engines.local.sampler import Sampler

        base = self.files.base
        if Path(base).is_dir():
            disable_progress_bar()
        length, quantization = rules.max_model_len, self.files.quantization
        with Sampler(base, max_model_len=length, seed=rules.seed, quantization=quantization) as sampler:
            self.files.load_adapter(sampler)
            client = TrainClientConfig(
                base_url=f"{sampler.url}/v1",
                api_key_var="HARBORTRAINER_NO_KEY",
                renderer=TypeAdapter(RendererConfig).validate_python(rules.renderer),
                renderer_model_name=base,
            )
            with imports_left_alone():
                yield Served(client, base, seeded=True, forget=sampler.ledger.take)


def choose(*, model: str | None, base_url: str | None, agent: str | None, key_var: str) -> Candidate:
    """What the command line names.

    Raises:
        UserError: Nothing, too much, or a model that is not there.
    """
    if agent in WITHOUT_MODEL:
        if model or base_url:
            what = f"{agent} asks no model"
            raise UserError(what, where="--agent", do="leave --model and --base-url out")
        return NoModel(agent)
    if model is None:
        do = "give --model M, --base-url URL --model NAME, or --agent oracle"
        raise UserError("nothing to evaluate", where="harbortrainer eval", do=do)
    if base_url is not None:
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"{base_url!r} is no URL", where="--base-url", do="write http://HOST:PORT/v1")
        return Endpoint(base_url.rstrip("/"), model, key_var)
    return LocalModel(PolicyFiles.find(model))
