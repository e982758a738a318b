"""The configs that Prime-RL's `rl` writes into the folder of a run, shortened (`write_subconfigs` at 559b44772)."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_prime_rl_configs(
    run: Path, model: str, *, tokenizer: str | None = None, env: Mapping[str, object] | None = None
) -> None:
    """Write the configs of a run without a model server.

    Args:
        run: The run folder.
        model: Folder or hub id of the base model.
        tokenizer: Folder or hub id of the tokenizer; by default the model's.
        env: The `env` table of the source.
    """
    named = {"name": model, "trust_remote_code": False}
    shared = {
        "tokenizer": {"name": tokenizer or model, "trust_remote_code": False, "chat_template": None},
        "output_dir": str(run),
        "max_steps": 6,
        "resume": None,
    }
    lora = {"rank": 4, "alpha": 32.0}
    client = {"base_url": "http://127.0.0.1:8000/v1", "api_key_var": "VLLM_API_KEY", "headers": {}}
    source = {"env": env or {}, "serve": {"address": None}, "name": "own"}
    configs: dict[str, object] = {
        "trainer": {"model": named | {"lora": lora}, **shared, "env_vars": {}},
        "orchestrator": {"model": named | {"lora": lora, "client": client}, "train": {"source": [source]}, **shared},
        "envs/train/own": source,
    }
    for name, config in configs.items():
        file = run / "configs" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config, indent=2))
