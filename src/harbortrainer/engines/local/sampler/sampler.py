"""The embedded sampler as one object: a model, an engine thread and an HTTP server.

Invariant: one policy version samples a whole request: the version that was newest when the request arrived.

Weight updates:
    - `load_adapter` waits for one forward pass. Running requests keep their version; new ones use the newest.
    - `load_weights` replaces the only copy of the weights. It waits for the running requests, and new ones wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.runfile import Quantization
from harbortrainer.engines.local.sampler.completion_log import CompletionLog
from harbortrainer.engines.model_folder import check_model_folder

if TYPE_CHECKING:
    from fastapi import FastAPI
    from peft import LoraConfig
    from torch import Tensor
    from transformers import PreTrainedModel

    from harbortrainer.engines.local.sampler.request_handler import RequestHandler
    from harbortrainer.engines.local.sampler.rescoring import Rescored
    from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine

_SELF_CHECK_LIMIT, _SELF_CHECK_LIMIT_HALF = 0.01, 0.5
"""Largest mean difference, nats per token, between sampled and rescored log-probabilities, in float32 and in half
precision. A model whose attention ignores the cache exceeds it with its first token."""


class Sampler:
    """Samples from a Hugging Face causal LM, behind the endpoints that verifiers and Prime-RL call.

    Args:
        model: A folder or a hub id that transformers can load.
        device: "auto" (cuda if there is a GPU, else cpu) or a torch device.
        dtype: "auto" (bfloat16 on a GPU, else float32) or a torch dtype's name.
        max_model_len: Longest prompt plus completion in tokens; None for the model's own limit.
        seed: The run's seed. A request without its own seed gets one derived from it, its session and its prompt.
        port: 0 picks a free one.
        model_name: The name that requests must use; None for `model` as given.
        cache_tokens: Tokens of the cache; by default a share of the free memory.
        quantization: "int8" or "nf4" for the model's linear layers; None for none.
        api_key: Key that requests must send as a bearer token; None for `default_key()`.

    Raises:
        UserError: The folder has no weights, the device is unknown, the port is in use, the model's architecture is not
            supported, or the memory is not enough.
    """

    processes: tuple[()] = ()
    """Child processes: none, it samples in this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        port: int = 0,
        host: str = "127.0.0.1",
        model_name: str | None = None,
        cache_tokens: int | None = None,
        quantization: Quantization | None = None,
        api_key: str | None = None,
    ) -> None:
        # Checked first, so that a wrong folder is reported before the slow import of torch and transformers.
        check_model_folder(model)
        from harbortrainer.engines import batching_internals  # noqa: F401 (refuses other releases of transformers)
        from harbortrainer.engines.local.sampler import sampled_model as loading
        from harbortrainer.engines.local.sampler.http_server import HttpServer, bind, default_key
        from harbortrainer.engines.memory_parts import explain_out_of_memory
        from harbortrainer.engines.models import load_tokenizer, require_vocabulary

        self.model_name = model_name or str(model)
        self.completion_log = CompletionLog()
        self.api_key = api_key or default_key()
        """Key that requests must send."""
        self._seed, self._cache_tokens = seed, cache_tokens
        self._handler: RequestHandler | None = None
        resolved = loading.resolve_device(device)
        dtype_ = loading.resolve_dtype(dtype, resolved)
        listener = bind(host, port)
        try:
            with explain_out_of_memory(f"the model {model}", "use a smaller model, or free memory on the device"):
                self._model = loading.load_model(model, device=resolved, dtype=dtype_, quantization=quantization)
            self._tokenizer = load_tokenizer(model, where=str(model))
            require_vocabulary(self._tokenizer, self._model.config, self.model_name, where=str(model))
            self.max_model_len = loading.context_limit(self._model.config, max_model_len)
        except BaseException:  # release the port, whatever the error
            listener.close()
            raise
        loading.use_threads(self._model)
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        """`http://HOST:PORT`, without `/v1`."""
        self._server = HttpServer(listener, self._open, self._close)

    def start(self) -> Sampler:
        """Start the engine thread and the server thread; returns once `/health` answers 200.

        Raises:
            UserError: There is no memory for one request of `max_model_len` tokens, or the self-check fails: sampled
                and rescored log-probabilities differ.
        """
        self._server.start()
        return self

    def stop(self) -> None:
        """Stop both threads; running requests get a 500. Safe to call twice."""
        self._server.stop()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def model(self) -> PreTrainedModel:
        """The sampled model. A learner may share its weights; the first weight update adds an adapter to it."""
        return self._model

    @property
    def version(self) -> int:
        """The policy version of new requests; 0 is the base model."""
        return self._handler.engine.version if self._handler else 0

    def load_adapter(self, source: Mapping[str, Tensor], version: int, *, config: LoraConfig | None = None) -> float:
        """Make `version` the policy of new requests, without waiting for running requests, which keep theirs.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: A state dict with peft's keys (`get_peft_model_state_dict`); its tensors are copied.
            version: The policy version of these weights.
            config: Required for the first adapter.

        Returns:
            Seconds during which nothing was sampled, without the forward pass that was already running.

        Raises:
            AdapterError: The adapter does not fit the model; the old version stays.
            EngineFailedError: The engine has ended.
        """
        if self._handler is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(
            self._handler.engine.update_weights(lambda used: self._adapters.load(source, config, used), version)
        )

    def load_weights(self, source: Mapping[str, Tensor], version: int) -> float:
        """Replace all weights once the running requests have ended; new requests wait meanwhile.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: Weights by the names of `named_parameters`; copied in place.
            version: The policy version of these weights.

        Returns:
            Seconds during which nothing was sampled, from the end of the last running request.

        Raises:
            AdapterError: The weights do not fit the model; the old version stays.
            EngineFailedError: The engine has ended.
        """
        from harbortrainer.engines.local.sampler.sampled_model import load_weights

        if self._handler is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(
            self._handler.engine.replace_weights(lambda: load_weights(self._model, source), version)
        )

    def rescore(self) -> list[Rescored]:
        """Rescore some samples of the last two versions: recorded and recomputed log-probabilities.

        Blocks while sampling continues; from an event loop call it with `asyncio.to_thread`.
        """
        if self._handler is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(self._handler.engine.rescore())

    def stats(self) -> dict[str, float]:
        """Return the counters: requests, failed, cancelled, prompt_tokens, sampled_tokens, running, waiting,
        cache_tokens, cache_used_tokens, version."""
        return self._handler.engine.stats() if self._handler else {}

    async def _open(self) -> FastAPI:
        from harbortrainer.engines.local.sampler.http_server import build_app
        from harbortrainer.engines.local.sampler.request_handler import RequestHandler
        from harbortrainer.engines.local.sampler.sampled_model import SampledAdapters, eos_tokens
        from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine
        from harbortrainer.engines.memory_parts import explain_out_of_memory

        engine = SamplingEngine(self._model, self.max_model_len, self.completion_log, cache_tokens=self._cache_tokens)
        self._adapters = SampledAdapters(self._model)
        eos = eos_tokens(self._model, self._tokenizer)
        self._handler = RequestHandler(engine, self._tokenizer, [self.model_name], self._seed, eos)
        with explain_out_of_memory("the sampler's cache", "lower max_model_len, or free memory on the device"):
            engine.start()
        await self._self_check(engine)
        return build_app(self._handler, self.api_key)

    async def _self_check(self, engine: SamplingEngine) -> None:
        from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
        from harbortrainer.engines.models import unsupported_model

        limit = _SELF_CHECK_LIMIT if self._model.dtype.itemsize == 4 else _SELF_CHECK_LIMIT_HALF
        try:
            difference = await engine.self_check()
        except EngineFailedError as error:
            raise unsupported_model(self.model_name, str(error)) from error
        if difference > limit:
            reason = (
                "sampling token by token and one pass over the whole text give different log-probabilities "
                f"({difference:.2f} nats apart, allowed {limit})"
            )
            raise unsupported_model(self.model_name, reason)

    async def _close(self) -> None:
        if self._handler is not None:
            await self._handler.engine.stop()
