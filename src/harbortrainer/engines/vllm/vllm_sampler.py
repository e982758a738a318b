"""vLLM as the sampler of a run: its process, the front before it, and the adapters between them.

Invariant: what was started is ended, however the start or the run ends; the adapters of versions that nobody asks for
any more are removed, and all of them at the end.
"""

import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
from safetensors.torch import save_file

from harbortrainer.engines.local.sampler.http_server import HttpServer, bind, build_app
from harbortrainer.engines.local.sampler.ledger import Ledger
from harbortrainer.engines.local.sampler.requests import BadRequestError, GenerateRequest
from harbortrainer.engines.local.sampler.rescoring import ScoredAgain
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
from harbortrainer.engines.model_folder import check_folder
from harbortrainer.engines.vllm.policy_front import PolicyFront
from harbortrainer.engines.vllm.socket_room import SocketRoom
from harbortrainer.engines.vllm.vllm_process import VllmProcess
from harbortrainer.engines.vllm.vllm_program import VARIABLES, ServeSettings, need_vllm
from harbortrainer.errors import RunStoppedError, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from peft import LoraConfig
    from torch import Tensor

STARTUP_S = 1800.0
"""Seconds in which vLLM loads, compiles and captures its graphs; as long as Prime-RL waits for it."""
STOP_S = 5.0
LONGEST_SOCKET = 107
OF_A_SOCKET = 37
"""Characters that vLLM puts behind the folder of its sockets."""


class VllmSampler:
    """Samples by a `vllm serve` of its own, behind the endpoint that verifiers calls.

    Args:
        model: A folder or a hub id.
        max_model_len: Most tokens of prompt and answer.
        folder: Where adapters wait for vLLM; removed at the end.
        log: File for what vLLM says.
        dtype: The learner's.
        memory_share: Of the card.
        lora_rank: The adapters'.
        adapted: As `ServeSettings` takes them.
        variables: Environment variables for it.
        port: Of the front; 0 picks a free one.

    Raises:
        UserError: no `vllm` that is new enough, no weights in the folder, a port in use.
    """

    model = None
    """Its weights are in another process: the learner has its own."""

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        folder: Path,
        log: Path,
        dtype: str,
        memory_share: float,
        lora_rank: int,
        adapted: Sequence[str],
        seed: int = 0,
        variables: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        check_folder(model)
        self._program = need_vllm()
        self._folder, self._log = folder.absolute(), log
        self._room = SocketRoom()
        # vLLM's processes talk by sockets there, which stay when they are killed.
        self._variables = VARIABLES | {"VLLM_RPC_BASE_PATH": str(self._room.path)} | dict(variables or {})
        self.ledger = Ledger()
        self._settings = ServeSettings(
            model=model,
            socket=self._room.path / "s",
            dtype=dtype,
            max_model_len=max_model_len,
            memory_share=memory_share,
            lora_rank=lora_rank,
            adapted=adapted,
            seed=seed,
        )
        self._process: VllmProcess | None = None
        self._front: PolicyFront | None = None
        try:
            self._listener = bind("127.0.0.1", port)
        except UserError:
            self._room.remove()
            raise
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = HttpServer(self._listener, self._open, self._close)

    @property
    def processes(self) -> Sequence[VllmProcess]:
        """What the run must not outlive."""
        return [self._process] if self._process else []

    def start(self) -> Self:
        """Starts vLLM and waits for it; returns once a token was sampled and a prompt scored.

        Raises:
            RunStoppedError: It ended, did not become ready, or does not answer as is needed.
            UserError: The path of its socket is too long.
        """
        try:
            self._start()
        except BaseException:  # Ctrl-C among them
            self.stop()
            raise
        return self

    def _start(self) -> None:
        if len(str(self._room.path)) + OF_A_SOCKET > LONGEST_SOCKET:
            do = "set TMPDIR to a shorter path"
            raise UserError("too long for a socket", where=str(self._settings.socket), do=do)
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        self._process = VllmProcess(self._settings.words(self._program), self._variables, self._log)
        transport = httpx.HTTPTransport(uds=str(self._settings.socket))
        with httpx.Client(transport=transport, base_url="http://vllm", timeout=10) as client:
            self._process.wait_until(lambda: _healthy(client), STARTUP_S)
        self._server.start()
        self._asked(self._probe())

    def _asked[T](self, work: Coroutine[None, None, T]) -> T:
        """What the front finds out; when vLLM cannot say it, the run cannot go on."""
        try:
            return self._server.call(work)
        except (EngineFailedError, BadRequestError) as error:
            raise RunStoppedError(str(error), do=f"see {self._log}") from error

    async def _probe(self) -> None:
        """Whether a request is answered as the proof needs it; the first in a run would not be told so clearly."""
        assert self._front is not None
        probe = {"token_ids": [0, 1], "sampling_params": {"max_tokens": 1}}
        await self._front.generate(GenerateRequest.model_validate(probe), "")
        await self._front.score_again()
        self.ledger.take("")
        self._front.counters.clear()

    def load_weights(self, source: "Mapping[str, Tensor]", version: int) -> float:
        """Raises `UserError`: vLLM is handed adapters only. The run's config has been asked before."""
        raise UserError("vLLM is handed adapters only", where="inference.engine", do="add [trainer.model.lora]")

    def load_adapter(self, source: "Mapping[str, Tensor]", version: int, *, config: "LoraConfig") -> float:
        """Makes `version` the policy: what is under way ends on the one before.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: A state dict with peft's keys (`get_peft_model_state_dict`).
            version: The policy version these weights are.
            config: The adapter's.

        Returns:
            Seconds that it took.

        Raises:
            RunStoppedError: vLLM did not take it.
        """
        assert self._front is not None, "start it first"
        started = time.perf_counter()
        folder = self._folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in source.items()}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        for gone in self._asked(self._front.hand_over(version, folder)):
            shutil.rmtree(self._folder / str(gone), ignore_errors=True)
        return time.perf_counter() - started

    def score_again(self) -> list[ScoredAgain]:
        """Log-probabilities of some samples as they were given, and as vLLM gives them for a prompt. Blocks."""
        assert self._front is not None, "start it first"
        return self._asked(self._front.score_again())

    def stats(self) -> dict[str, float]:
        """Counters: requests, failed, cancelled, prompt_tokens, sampled_tokens, running, version."""
        if self._front is None:
            return {}
        now = {"running": self._front.versions.running, "version": self._front.versions.current}
        names = ("requests", "failed", "cancelled", "prompt_tokens", "sampled_tokens")
        return {name: self._front.counters[name] for name in names} | now

    def stop(self) -> None:
        """Ends vLLM and the front; requests still running get a 500. Safe to call twice."""
        if self._process is not None:
            self._process.ask_to_end()
        self._server.stop()
        if self._process is not None:
            self._process.stop(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._room.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def _open(self) -> "FastAPI":
        assert self._process is not None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(uds=str(self._settings.socket), limits=limits)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)
        settings = self._settings
        self._front = PolicyFront(self._client, self._process, settings.model, settings.max_model_len, self.ledger)
        return build_app(self._front)

    async def _close(self) -> None:
        if self._front is not None:
            await self._client.aclose()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
