"""The embedded sampler as one object: a model, an engine thread, and an HTTP server in front of it.

Invariant: one request is sampled by one policy version, the one that was newest when it came. `load_adapter` waits for
one forward pass: the running requests go on by their own version, new ones begin by the newest. `load_weights`, which
has no second copy, waits for the running requests to end, and new ones wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.runfile import Quantization
from harbortrainer.engines.local.sampler.ledger import Ledger
from harbortrainer.engines.model_folder import check_folder

if TYPE_CHECKING:
    from fastapi import FastAPI
    from peft import LoraConfig
    from torch import Tensor
    from transformers import PreTrainedModel

    from harbortrainer.engines.local.sampler.replies import Replies
    from harbortrainer.engines.local.sampler.rescoring import ScoredAgain
    from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine

_APART, _APART_IN_HALF = 0.01, 0.5
"""Nats a token that what was sampled may be from what one forward pass says, in float32 and in half precision. A model
whose attention does not ask for the cache is further off by its first token already."""


class Sampler:
    """Samples from a Hugging Face causal LM, behind the endpoints that verifiers and Prime-RL call.

    Args:
        model: A folder or a hub id that transformers can load.
        device: "auto" (cuda when there is a GPU, else cpu) or a torch device.
        dtype: "auto" (bfloat16 on a GPU, else float32) or a torch dtype's name.
        max_model_len: Longest prompt plus completion in tokens; None takes the model's own limit.
        seed: The run's seed. A request without its own seed gets one derived from it, its session and its prompt.
        port: 0 picks a free one.
        model_name: The name requests must use; None takes `model` as it was given.
        cache_tokens: Tokens of the cache; by default a share of the memory that is free.
        quantization: Of the model's linear layers: "int8", "nf4" or none.

    Raises:
        UserError: no weights in the folder, an unknown device, a port in use, a kind of model that cannot be sampled or
            for which there is no memory.
    """

    processes: tuple[()] = ()
    """It samples in this one."""

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
    ) -> None:
        # torch and transformers take seconds to import; whoever has named a wrong folder need not wait for them.
        check_folder(model)
        from harbortrainer.engines import batching_internals  # noqa: F401 (refuses another release of transformers)
        from harbortrainer.engines.device_memory import room_for
        from harbortrainer.engines.local.sampler import sampled_model as loading
        from harbortrainer.engines.local.sampler.http_server import HttpServer, bind
        from harbortrainer.engines.pretrained import load_tokenizer

        self.model_name = model_name or str(model)
        self.ledger = Ledger()
        self._seed, self._cache_tokens = seed, cache_tokens
        self._replies: Replies | None = None
        resolved = loading.resolve_device(device)
        dtype_ = loading.resolve_dtype(dtype, resolved)
        listener = bind(host, port)
        try:
            with room_for(f"the model {model}", "use a smaller model, or free memory on the device"):
                self._model = loading.load_model(model, device=resolved, dtype=dtype_, quantization=quantization)
            self._tokenizer = load_tokenizer(model, where=str(model))
            self.max_model_len = loading.context_limit(self._model.config, max_model_len)
        except BaseException:  # whatever it was goes on up; the port is free again
            listener.close()
            raise
        loading.use_threads(self._model)
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        """`http://HOST:PORT`, without `/v1`."""
        self._server = HttpServer(listener, self._open, self._close)

    def start(self) -> Sampler:
        """Starts the engine thread and the server thread; returns once `/health` answers 200.

        Raises:
            UserError: no memory for one request of `max_model_len` tokens, or a model that is seen to sample something
                else than it computes.
        """
        self._server.start()
        return self

    def stop(self) -> None:
        """Stops both threads; requests still running get a 500. Safe to call twice."""
        self._server.stop()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def model(self) -> PreTrainedModel:
        """The model that is sampled from, whose weights a learner may share; the first hand-over puts an adapter in."""
        return self._model

    @property
    def version(self) -> int:
        """The policy version that new requests are sampled by; 0 is the base model."""
        return self._replies.engine.version if self._replies else 0

    def load_adapter(self, source: Mapping[str, Tensor], version: int, *, config: LoraConfig | None = None) -> float:
        """Makes `version` the policy of new requests. The running ones go on by theirs, and nobody waits for them.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: A state dict with peft's keys (`get_peft_model_state_dict`); its tensors are copied.
            version: The policy version these weights are.
            config: Needed until one has been loaded.

        Returns:
            Seconds during which nothing was sampled; the forward pass that had begun is not included.

        Raises:
            AdapterError: the adapter does not fit the model; the old version stays.
            EngineFailedError: the engine is gone.
        """
        if self._replies is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(
            self._replies.engine.hand_over(lambda used: self._adapters.load(source, config, used), version)
        )

    def load_weights(self, source: Mapping[str, Tensor], version: int) -> float:
        """Makes `version` the policy of new requests, all of whose weights are these; they wait until the running
        requests, which are the old version's, have ended.

        Blocks; from an event loop call it with `asyncio.to_thread`.

        Args:
            source: By `named_parameters`' names; copied in place.
            version: The policy version these weights are.

        Returns:
            Seconds during which nothing was sampled, from the end of the last running request.

        Raises:
            AdapterError: the weights are another model's; the old version stays.
            EngineFailedError: the engine is gone.
        """
        from harbortrainer.engines.local.sampler.sampled_model import load_weights

        if self._replies is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(self._replies.engine.swap(lambda: load_weights(self._model, source), version))

    def score_again(self) -> list[ScoredAgain]:
        """Log-probabilities of some samples of the last two versions as they were given, and computed once more.

        Blocks, while sampling goes on; from an event loop call it with `asyncio.to_thread`.
        """
        if self._replies is None:
            raise RuntimeError("start the sampler first")
        return self._server.call(self._replies.engine.score_again())

    def stats(self) -> dict[str, float]:
        """Counters: requests, failed, cancelled, prompt_tokens, sampled_tokens, running, waiting, cache_tokens,
        cache_used_tokens, version, graph_passes (which CUDA graphs computed), handovers, handover_s and handover_wait_s
        (the last one's), handover_total_s."""
        return self._replies.engine.stats() if self._replies else {}

    async def _open(self) -> FastAPI:
        from harbortrainer.engines.device_memory import room_for
        from harbortrainer.engines.local.sampler.http_server import build_app
        from harbortrainer.engines.local.sampler.replies import Replies
        from harbortrainer.engines.local.sampler.sampled_model import SampledAdapters, end_tokens
        from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine

        engine = SamplingEngine(self._model, self.max_model_len, self.ledger, cache_tokens=self._cache_tokens)
        self._adapters = SampledAdapters(self._model)
        eos = end_tokens(self._model, self._tokenizer)
        self._replies = Replies(engine, self._tokenizer, [self.model_name], self._seed, eos)
        with room_for("the sampler's cache", "lower max_model_len, or free memory on the device"):
            engine.start()
        await self._try(engine)
        return build_app(self._replies)

    async def _try(self, engine: SamplingEngine) -> None:
        from harbortrainer.engines.architectures import unsampled
        from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError

        apart, allowed = 0.0, _APART if self._model.dtype.itemsize == 4 else _APART_IN_HALF
        try:
            apart = await engine.disagreement()
        except EngineFailedError as error:
            raise unsampled(self.model_name, str(error)) from error
        if apart > allowed:
            why = f"token by token it says something else than of the whole ({apart:.2f} nats apart, allowed {allowed})"
            raise unsampled(self.model_name, why)

    async def _close(self) -> None:
        if self._replies is not None:
            await self._replies.engine.stop()
