"""Starts one of Prime-RL's programs (`rl`, `orchestrator`, `env-server`) on a machine without a GPU.

Run by the Python of Prime-RL's environment. Its code is used as it is; two imports are cut that only its trainer and
its in-memory weight transports need and that pull in vllm and flash-attn: `prime_rl.trainer.model`, of which the
orchestrator uses `setup_tokenizer`, and `prime_rl.transports.weights`.
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
    """What `prime_rl.trainer.model.setup_tokenizer` does."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


class ModelExpressSession:
    """Only named in annotations when weights go through the file system."""


def module(name: str, **names: object) -> None:
    """Put a module with these names in the place of one that cannot be imported here."""
    stand_in = ModuleType(name)
    stand_in.__path__ = []
    vars(stand_in).update(names)
    sys.modules[name] = stand_in


def main(program: str, arguments: list[str]) -> None:
    """Cut the imports and hand over."""
    module("prime_rl.trainer.model", setup_tokenizer=setup_tokenizer, pre_download_model=lambda *_, **__: None)
    module("prime_rl.transports.weights")
    module("prime_rl.transports.weights.nixl")
    module("prime_rl.transports.weights.nixl.model_express", ModelExpressSession=ModelExpressSession)
    sys.argv = [program, *arguments]
    importlib.import_module(PROGRAMS[program]).main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
