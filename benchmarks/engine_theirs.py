"""The other side of `benchmarks/engine.py`: transformers' `generate` and TRL's GRPOTrainer, with the same LoRA."""

import importlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine_setting import ALPHA, RANK, TARGETS, Setting


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=TARGETS)


def load(case: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(case.folder, dtype=getattr(torch, case.dtype))
    return model.to(case.device)


class Generate:
    """transformers' `generate` on one left-padded batch, with the same LoRA as our side.

    Args:
        model: The model without an adapter.
    """

    def __init__(self, case: Setting, model: Any) -> None:
        from peft import inject_adapter_in_model

        self.case, self.model = case, model.eval()
        inject_adapter_in_model(lora_config(), self.model)

    def sample(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Return the seconds of one call; all rows continue until the longest answer is done."""
        import torch

        width, pad = max(map(len, prompts)), self.model.config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.case.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.case.device)
        longest = max(lengths)
        start = time.perf_counter()
        with torch.no_grad():
            self.model.generate(
                ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return time.perf_counter() - start


def trl_steps(case: Setting, rollouts: dict[str, list] | None, between: Callable[[], object]) -> list[float]:
    """Return the seconds of each step of TRL's GRPOTrainer, without the first.

    Args:
        rollouts: Prompts, completions and log-probabilities, to measure training alone; None lets TRL generate them.
        between: Called after each step, outside its time. Our side runs there, so that machine load affects both.
    """
    from transformers import AutoTokenizer, TrainerCallback

    # Only the dependency group `bench` installs these two.
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.began, self.seconds = 0.0, []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)
            between()

    clock, on_cpu = Clock(), case.device == "cpu"
    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            out, per_device_train_batch_size=len(case.prompts), num_generations=case.group, beta=0.0,
            max_completion_length=case.new, max_steps=case.repeats + 1, learning_rate=1e-4, use_cpu=on_cpu,
            bf16=not on_cpu, gradient_checkpointing=not on_cpu, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, generation_kwargs={"min_new_tokens": case.new},
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=load(case),
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in case.prompts]),
            processing_class=AutoTokenizer.from_pretrained(case.folder, padding_side="left"),
            peft_config=lora_config(),
            callbacks=[clock],
            rollout_func=(lambda prompts, trainer: rollouts) if rollouts else None,
        )
        trainer.train()
    return clock.seconds[1:]
