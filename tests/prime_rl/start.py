"""Starts one of Prime-RL's programs (`rl`, `orchestrator`, `env-server`) on a machine without a GPU.

Needs the Python of Prime-RL's environment. Prime-RL's code is unchanged, but two modules that import vllm and
flash-attn are replaced: `prime_rl.trainer.model` and `prime_rl.transports.weights`. Only Prime-RL's trainer and its
in-memory weight transports need them; the orchestrator uses only `setup_tokenizer`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

PROGRAMS = {
    "rl": "prime_rl.entrypoints.rl",
    "orchestrator": "prime_rl.entrypoints.orchestrator",
    "env-server": "prime_rl.entrypoints.env_server",
}


def setup_tokenizer(config: Any) -> Any:
    """Load the tokenizer as `prime_rl.trainer.model.setup_tokenizer` does."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


class ModelExpressSession:
    """Placeholder for annotations; unused when weights go through the file system."""


def replace_module(name: str, **members: object) -> None:
    """Register a stub with these members for a module that cannot be imported here."""
    stub = ModuleType(name)
    stub.__path__ = []
    vars(stub).update(members)
    sys.modules[name] = stub


def main(program: str, arguments: list[str]) -> None:
    """Replace the GPU modules and start the program."""
    replace_module("prime_rl.trainer.model", setup_tokenizer=setup_tokenizer, pre_download_model=lambda *_, **__: None)
    replace_module("prime_rl.transports.weights")
    replace_module("prime_rl.transports.weights.nixl")
    replace_module("prime_rl.transports.weights.nixl.model_express", ModelExpressSession=ModelExpressSession)
    sys.argv = [program, *arguments]
    importlib.import_module(PROGRAMS[program]).main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
