"""A reference sampler: peft's own loading, one whole forward pass per token, float32 logits.

It is independent of the learner's and the sampler's code, so both can be compared with it. Slow; for tiny models.
"""

from collections.abc import Mapping
from pathlib import Path

from harbortrainer.engines.local.learner.training_sample import Sample


class PlainSampler:
    """A folder's base model, with a LoRA in peft's saved format or with all weights replaceable."""

    def __init__(self, model: Path, adapter_config: Mapping | None, seed: int = 0) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = (base if adapter_config is None else get_peft_model(base, LoraConfig(**adapter_config))).eval()
        self.generator = torch.Generator().manual_seed(seed)
        self.version = 0

    def load(self, weights: dict, version: int) -> None:
        """Load the weights of one policy version."""
        from peft import PeftModel, set_peft_model_state_dict

        if isinstance(self.model, PeftModel):
            result = set_peft_model_state_dict(self.model, weights)
        else:
            result = self.model.load_state_dict(weights, strict=False)
        assert not result.unexpected_keys
        self.version = version

    def sample(self, prompt: list[int], count: int, length: int, temperature: float = 1.0):
        """Return `count` samples of the prompt and `length` sampled tokens each, with advantage 0."""
        import torch

        ids = torch.tensor([prompt] * count)
        logprobs = []
        with torch.no_grad():
            for _ in range(length):
                step = torch.log_softmax(self.model(input_ids=ids).logits[:, -1].float() / temperature, -1)
                token = torch.multinomial(step.exp(), 1, generator=self.generator)
                logprobs.append(step.gather(-1, token))
                ids = torch.cat([ids, token], 1)
        found = torch.cat(logprobs, 1).tolist()
        return [self._sample(row, found[i], len(prompt), temperature, i) for i, row in enumerate(ids.tolist())]

    def _sample(self, ids: list[int], logprobs: list[float], prompt: int, temperature: float, i: int) -> Sample:
        return Sample(
            token_ids=ids,
            mask=[False] * prompt + [True] * len(logprobs),
            logprobs=[0.0] * prompt + logprobs,
            versions=[0] * prompt + [self.version] * len(logprobs),
            temperature=temperature,
            advantage=0.0,
            task_key="demo",
            trial_name=f"demo__{i}",
        )
