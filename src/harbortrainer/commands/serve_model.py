"""`harbortrainer serve`: serve a model with the embedded sampler."""

import os
import signal
import threading

from harbortrainer.engines.engine_choice import require_extra
from harbortrainer.runs.display import loading


def serve_model(model: str, *, port: int, max_model_len: int, seed: int) -> int:
    """Serve a model until SIGINT or SIGTERM. Call it from the main thread, which handles the signals.

    Prints the address and the key when the server is ready. `HARBORTRAINER_SAMPLER_KEY` sets the key, which is then not
    printed.
    """
    require_extra("torch", "transformers", "fastapi", "uvicorn")
    loading("torch and the model", "torch")
    from harbortrainer.engines.local.sampler import Sampler
    from harbortrainer.engines.local.sampler.http_server import KEY_VARIABLE

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with Sampler(model, port=port, max_model_len=max_model_len, seed=seed) as sampler:
        key = f"the value of ${KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else sampler.api_key
        print(f"serving {model} at {sampler.url} (context {sampler.max_model_len}, API key {key})", flush=True)
        while not stopping.wait(0.5):
            pass
    return 0
