"""`harbortrainer serve`: serve a model with the embedded sampler."""

import signal
import threading

from harbortrainer.engines.engine_choice import require_extra
from harbortrainer.runs.display import loading


def serve_model(model: str, *, port: int, max_model_len: int, seed: int) -> int:
    """Serve a model until SIGINT or SIGTERM. Call it from the main thread, which handles the signals.

    Prints the address when the server is ready.
    """
    require_extra("torch", "transformers", "fastapi", "uvicorn")
    loading("torch and the model", "torch")
    from harbortrainer.engines.local.sampler import Sampler

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with Sampler(model, port=port, max_model_len=max_model_len, seed=seed) as sampler:
        print(f"serving {model} at {sampler.url} (context {sampler.max_model_len})", flush=True)
        while not stopping.wait(0.5):
            pass
    return 0
