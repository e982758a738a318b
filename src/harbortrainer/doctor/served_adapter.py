"""Whether vLLM can serve the adapter that is trained."""

from collections.abc import Iterator

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.finding import Finding, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan

LARGEST_RANK = 512
"""The largest that vLLM takes (`VALID_VLLM_LORA_RANKS` of Prime-RL's schema at the pin)."""

NOT_SERVED = ("lm_head", "embed_tokens", "wte")


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Rank and target modules of `[trainer.model.lora]`."""
    run = plan.run
    if isinstance(run, RunConfig) and run.lora is not None and run.inference.engine == "vllm":
        yield from served(plan, run.lora, LARGEST_RANK)
    if isinstance(run, PrimeRun) and run.trainer.model.lora is not None and run.inference is not None:
        yield from served(plan, run.trainer.model.lora, run.inference.vllm.max_lora_rank or LARGEST_RANK)


def served(plan: LaunchPlan, lora: LoraSettings, most: int) -> Iterator[Finding]:
    """What vLLM would refuse, or leave out; `most` is the largest rank that it takes."""
    if lora.rank > most:
        what = f"rank {lora.rank} is above the largest that vLLM serves here ({most})"
        yield red(
            "adapter", what, "lower it, or raise inference.vllm.max_lora_rank", plan.where("trainer.model.lora.rank")
        )
    outside = [name for name in lora.target_modules if any(part in name for part in NOT_SERVED)]
    if outside:
        what = f"vLLM serves no adapter on {', '.join(outside)}: it would sample from another policy than is trained"
        yield yellow("adapter", what, "leave it out", plan.where("trainer.model.lora.target_modules"))
