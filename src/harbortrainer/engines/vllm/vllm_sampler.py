"""vLLM as a run's sampler: its process, the proxy in front of it, and the adapter files that they exchange.

Invariant: whatever was started is ended, however the start or the run ends. Adapter files are removed as soon as no
request can use their version, and all of them at the end.
"""

import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
from safetensors.torch import save_file

from harbortrainer.engines.local.sampler.completion_log import CompletionLog
from harbortrainer.engines.local.sampler.http_server import HttpServer, bind, build_app, default_key
from harbortrainer.engines.local.sampler.requests import BadRequestError, GenerateRequest
from harbortrainer.engines.local.sampler.rescoring import Rescored
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
from harbortrainer.engines.model_folder import check_model_folder
from harbortrainer.engines.socket_folder import SocketFolder
from harbortrainer.engines.vllm.vllm_process import VARIABLES, ServeSettings, VllmProcess, require_vllm
from harbortrainer.engines.vllm.vllm_proxy import VllmProxy
from harbortrainer.errors import RunStoppedError, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from peft import LoraConfig
    from torch import Tensor

STARTUP_S = 1800.0
"""Time for vLLM to load, compile and capture its graphs; Prime-RL's value."""
STOP_S = 5.0
_SOCKET_NAME_LENGTH = 37
"""Characters that vLLM appends to its socket folder's path."""


class VllmSampler:
    """Samples with a `vllm serve` of its own, behind the endpoint that verifiers calls.

    Args:
        model: A folder or a hub id.
        max_model_len: Longest prompt plus completion, in tokens.
        folder: Folder for the adapters that vLLM loads; removed at the end.
        log: File for vLLM's output.
        dtype: The learner's dtype.
        memory_share: vLLM's share of the GPU's memory.
        lora_rank: The adapters' rank.
        lora_layers: See `ServeSettings`.
        variables: Environment variables for vLLM.
        host: The proxy's address or name.
        port: The proxy's port; 0 picks a free one.
        api_key: Key that requests to the proxy must send; None for `default_key()`.

    Raises:
        UserError: `vllm` is missing or too old, the folder has no weights, or the port is in use.
    """

    model = None
    """None: the weights are in another process, so the learner loads its own."""

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
        lora_layers: Sequence[str],
        seed: int = 0,
        variables: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        check_model_folder(model)
        self._program = require_vllm()
        self._folder, self._log = folder.absolute(), log
        self._sockets = SocketFolder("vllm-", name_length=_SOCKET_NAME_LENGTH)
        # vLLM's processes communicate through sockets there, which remain if they are killed.
        self._variables = VARIABLES | {"VLLM_RPC_BASE_PATH": str(self._sockets.path)} | dict(variables or {})
        self.completion_log = CompletionLog()
        self.api_key = api_key or default_key()
        self._settings = ServeSettings(
            model=model,
            socket=self._sockets.path / "s",
            dtype=dtype,
            max_model_len=max_model_len,
            memory_share=memory_share,
            lora_rank=lora_rank,
            lora_layers=lora_layers,
            seed=seed,
        )
        self._process: VllmProcess | None = None
        self._proxy: VllmProxy | None = None
        try:
            self._listener = bind(host, port)
        except UserError:
            self._sockets.remove()
            raise
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._server = HttpServer(self._listener, self._open, self._close)

    @property
    def processes(self) -> Sequence[VllmProcess]:
        """Child processes that the run depends on."""
        return [self._process] if self._process else []

    def start(self) -> Self:
        """Start vLLM; returns once a token was sampled and a prompt scored.

        Raises:
            RunStoppedError: vLLM ended, was not ready in time, or gave an invalid reply.
        """
        try:
            self._start()
        except BaseException:  # including Ctrl-C
            self.stop()
            raise
        return self

    def _start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a killed run
        self._process = VllmProcess(self._settings.command(self._program), self._variables, self._log)
        transport = httpx.HTTPTransport(uds=str(self._settings.socket))
        with httpx.Client(transport=transport, base_url="http://vllm", timeout=10) as client:
            self._process.wait_until(lambda: _healthy(client), STARTUP_S)
        self._server.start()
        self._call(self._probe())

    def _call[T](self, work: Coroutine[None, None, T]) -> T:
        """Run the proxy's coroutine; a failure stops the run."""
        try:
            return self._server.call(work)
        except (EngineFailedError, BadRequestError) as error:
            raise RunStoppedError(str(error), do=f"see {self._log}") from error

    async def _probe(self) -> None:
        """Check that replies have what the log-probability check needs; the first request of a run would fail later."""
        assert self._proxy is not None
        probe = {"token_ids": [0, 1], "sampling_params": {"max_tokens": 1}}
        await self._proxy.generate(GenerateRequest.model_validate(probe), "")
        await self._proxy.rescore()
        self.completion_log.pop("")
        self._proxy.counters.clear()

    def load_weights(self, source: "Mapping[str, Tensor]", version: int) -> float:
        """Raise `UserError`: vLLM only loads adapters. The run's config is checked earlier."""
        raise UserError("vLLM only loads adapters", where="inference.engine", do="add [trainer.model.lora]")

    def load_adapter(self, source: "Mapping[str, Tensor]", version: int, *, config: "LoraConfig") -> float:
        """Make `version` the policy of new requests; running requests keep theirs.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: A state dict with peft's keys (`get_peft_model_state_dict`).
            version: The policy version of these weights.
            config: The adapter's config.

        Returns:
            Seconds that the update took.

        Raises:
            RunStoppedError: vLLM did not load the adapter.
        """
        assert self._proxy is not None, "start the sampler first"
        started = time.perf_counter()
        folder = self._folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in source.items()}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        for evicted in self._call(self._proxy.update_weights(version, folder)):
            shutil.rmtree(self._folder / str(evicted), ignore_errors=True)
        return time.perf_counter() - started

    def rescore(self) -> list[Rescored]:
        """Rescore some samples as prompts: recorded and recomputed log-probabilities. Blocks."""
        assert self._proxy is not None, "start the sampler first"
        return self._call(self._proxy.rescore())

    def stats(self) -> dict[str, float]:
        """Return the counters: requests, failed, cancelled, prompt_tokens, sampled_tokens, running, version."""
        if self._proxy is None:
            return {}
        current = {"running": self._proxy.versions.running, "version": self._proxy.versions.current}
        names = ("requests", "failed", "cancelled", "prompt_tokens", "sampled_tokens")
        return {name: self._proxy.counters[name] for name in names} | current

    def stop(self) -> None:
        """End vLLM and the proxy; running requests get a 500. Safe to call twice."""
        if self._process is not None:
            self._process.terminate()
        self._server.stop()
        if self._process is not None:
            self._process.stop(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._sockets.remove()

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
        self._proxy = VllmProxy(
            self._client, self._process, settings.model, settings.max_model_len, self.completion_log
        )
        return build_app(self._proxy, self.api_key)

    async def _close(self) -> None:
        if self._proxy is not None:
            await self._client.aclose()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
