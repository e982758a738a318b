"""The sampler as a process: what `harbortrainer serve` and `python -m harbortrainer.engines.local.sampler` call."""

import signal
import threading
from pathlib import Path

from harbortrainer.engines.local.sampler.sampler import Sampler
from harbortrainer.errors import UserError


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
    adapter: str | Path | None = None,
    model_name: str | None = None,
) -> int:
    """Serves until SIGINT or SIGTERM; from the main thread. Prints the address once requests are answered.

    Returns:
        0, the process's exit code.

    Raises:
        UserError: what `Sampler` raises, or an adapter that cannot be loaded.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    sampler = Sampler(
        model,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,
        model_name=model_name,
    )
    with sampler:
        if adapter is not None:
            _load(sampler, adapter)
        print(f"serving {model} at {sampler.url} (context {sampler.max_model_len})", flush=True)
        while not stopping.wait(0.5):
            pass
    return 0


def _load(sampler: Sampler, adapter: str | Path) -> None:
    from harbortrainer.engines.local.sampler.adapter import AdapterError

    try:
        sampler.load_adapter(adapter, version=1)
    except (AdapterError, OSError) as error:
        raise UserError(
            f"cannot be loaded ({error})", where=str(adapter), do="name a LoRA adapter of this model"
        ) from error
