"""`harbortrainer serve`: serve a model with the embedded sampler."""

import os
import sys

from harbortrainer.doctor.preflight import check_model
from harbortrainer.engines.engine_choice import require_bitsandbytes, require_extra
from harbortrainer.evaluation.policy_files import PolicyFiles
from harbortrainer.runs.display import loading
from harbortrainer.runs.interrupt import stop_event

DEFAULT_CONTEXT = 4096
"""Context length in tokens if none is given; a model with fewer positions has its own."""


def serve_model(model: str, *, port: int, max_model_len: int | None, seed: int) -> int:
    """Serve a policy until SIGINT or SIGTERM. Call it from the main thread, which handles the signals.

    Prints the address and the key when the server is ready. `HARBORTRAINER_SAMPLER_KEY` sets the key, which is then not
    printed.

    Args:
        model: A model, an adapter, a checkpoint or a run, as `PolicyFiles.find` takes it. It is also the served name.

    Raises:
        UserError: There is no such policy, or its adapter does not fit its base.
    """
    require_extra("torch", "transformers", "fastapi", "uvicorn")
    files = PolicyFiles.find(model)
    for line in files.passed_over:
        print(f"warning: {line}", file=sys.stderr)
    check_model(files.base, "harbortrainer serve")
    if files.quantization is not None:
        require_bitsandbytes()
    with loading("torch", "torch"):
        from harbortrainer.engines.local.sampler import Sampler
        from harbortrainer.engines.local.sampler.http_server import KEY_VARIABLE

    stopping = stop_event()
    with Sampler(
        files.base,
        port=port,
        max_model_len=max_model_len or files.context_limit(DEFAULT_CONTEXT) or DEFAULT_CONTEXT,
        seed=seed,
        model_name=model,
        quantization=files.quantization,
    ) as sampler:
        files.load_adapter(sampler)
        key = f"the value of ${KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else sampler.api_key
        served = f"{files} as {model}" if files.adapter else files
        print(f"serving {served} at {sampler.url} (context {sampler.max_model_len}, API key {key})", flush=True)
        while not stopping.wait(0.5):
            pass
    return 0
