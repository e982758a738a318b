"""A local policy is served with its adapter; an adapter that does not fit is one line of error."""

from pathlib import Path

import httpx
import pytest
from prime_rl_configs import write_prime_rl_configs
from tiny_model import build_tiny_model

from harbortrainer.environment.request_check import RunKey
from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import LocalModel
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.evaluation.policy_files import PolicyFiles

RULES = EvalRules.of(None).with_overrides(temperature=None, max_tokens=None, max_turns=None, max_model_len=256)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base") / "model")


def write_adapter(folder: Path, base: Path, *, does_something: bool) -> Path:
    """Write an adapter with peft: with random weights, or with initial weights that change nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=not does_something
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(folder))
    return folder


def write_prime_rl_run(run: Path, trained: Path, base: Path) -> Path:
    """Write a run of Prime-RL with a copy of an adapter, whose tensors have Prime-RL's names."""
    from safetensors.torch import load_file, save_file

    write_prime_rl_configs(run, str(base))
    folder = run / "broadcasts/step_1"
    folder.mkdir(parents=True)
    name = "adapter_model.safetensors"
    tensors = load_file(trained / name)
    save_file({key.removeprefix("base_model.model."): value for key, value in tensors.items()}, folder / name)
    (folder / "adapter_config.json").write_bytes((trained / "adapter_config.json").read_bytes())
    (folder / "STABLE").touch()
    return run


def said_by(policy: Path) -> str:
    """Return the greedy answer of a policy."""
    with LocalModel(PolicyFiles.find(str(policy))).serve(RULES, RunKey.random()) as served:
        assert served.seeded
        body = {"model": served.model, "messages": [{"role": "user", "content": "the quick brown"}], "temperature": 0}
        url = f"{served.client.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {served.api_key}"}
        reply = httpx.post(url, json=body | {"max_tokens": 24}, headers=headers, timeout=120, trust_env=False)
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.long
def test_local_model_samples_with_adapter(tmp_path: Path, base: Path) -> None:
    alone = said_by(base)
    assert said_by(write_adapter(tmp_path / "fresh", base, does_something=False)) == alone
    trained = write_adapter(tmp_path / "trained", base, does_something=True)
    answer = said_by(trained)
    assert answer != alone
    assert said_by(write_prime_rl_run(tmp_path / "prime", trained, base)) == answer


@pytest.mark.long
def test_checkpoint_is_served_on_its_quantized_base(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    checkpoint = write_adapter(tmp_path / "run" / "checkpoints" / "step_1", base, does_something=False)
    alone = said_by(base)
    assert said_by(checkpoint) == alone
    (tmp_path / "run" / "config.toml").write_text(f'[model]\nname = "{base}"\nquantization = "nf4"\n')
    assert said_by(checkpoint) != alone


def test_reports_adapter_of_other_model(tmp_path: Path, base: Path) -> None:
    other = build_tiny_model(tmp_path / "other", hidden=32)
    adapter = write_adapter(tmp_path / "adapter", other, does_something=True)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(str(other), str(base)))
    with pytest.raises(UserError, match=f"does not fit {base}") as caught:
        said_by(adapter)
    assert "\n" not in str(caught.value)
