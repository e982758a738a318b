"""The embedded sampler as one object: a model, an engine thread, and an HTTP server in front of it.

Invariant: one request is sampled by one policy version. `load_adapter` lets the running requests end (new ones wait),
swaps the weights, drops the prefix cache, and only then lets the waiting ones in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbortrainer.engines.local.sampler.ledger import Ledger


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

    Raises:
        UserError: no weights in the folder, an unknown device, a port in use.
    """

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
    ) -> None:
        self.ledger = Ledger()

    def start(self) -> "Sampler":
        """Starts the engine thread and the server thread; returns once `/health` answers 200."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops both threads; requests still running get a 500. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> "Sampler":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, without `/v1`."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The policy version that samples now; 0 is the base model."""
        raise NotImplementedError

    def load_adapter(
        self, source: str | Path | Mapping[str, Any], version: int, *, config: Any = None
    ) -> float:
        """Makes `version` the policy: waits until the running requests have ended, swaps, drops the prefix cache.

        Args:
            source: A folder in peft's format, or a state dict with peft's keys (`get_peft_model_state_dict`); its
                tensors are copied.
            version: The policy version these weights are.
            config: The `peft.LoraConfig`; needed with a state dict until one has been loaded.

        Returns:
            Seconds during which nothing was sampled, the wait for running requests not included.
        """
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """Counters: requests, prompt_tokens, sampled_tokens, cached_tokens, running, waiting, version, handovers,
        handover_s (last swap), handover_wait_s (last wait), busy_s, steps."""
        raise NotImplementedError
