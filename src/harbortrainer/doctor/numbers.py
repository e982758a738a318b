"""Numbers against each other: what fits into what."""

from collections.abc import Iterator

from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan

ABOUT = "numbers"


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """seq_len, max_model_len, max_completion_tokens, model_info; batch, group and parallel trials."""
    if plan.run is None:
        return
    found = [*lengths(plan), *counts(plan)]
    yield from found
    if not found:
        yield green(ABOUT, "seq_len, max_model_len, max_completion_tokens, batch and group fit")


def lengths(plan: LaunchPlan) -> Iterator[Finding]:
    """A sample holds a whole trial; an answer leaves room for its prompt."""
    assert plan.run is not None
    seq_len, inference = plan.run.seq_len, plan.run.inference
    model_len = inference.vllm.max_model_len if inference else None
    context = model_len or seq_len
    answer = plan.run.orchestrator.train.sampling.max_completion_tokens
    if context > seq_len:
        what = f"max_model_len ({context}) is more than seq_len ({seq_len}): longer trials are cut before training"
        yield yellow(ABOUT, what, "set seq_len to max_model_len", plan.where("seq_len"))
    if answer and answer >= context:
        what = f"max_completion_tokens ({answer}) leaves no room for a prompt in {context} tokens"
        yield red(ABOUT, what, "lower it", plan.where("orchestrator.train.sampling.max_completion_tokens"))
    for key, harness in plan.harnesses.items():
        told = (harness.agent_kwargs.get("model_info") or {}).get("max_input_tokens")
        if told and int(told) > context:
            what = f"model_info tells the agent of {told} input tokens, the model has {context}"
            where = plan.where(f"{key}.agent_kwargs.model_info.max_input_tokens")
            yield red(ABOUT, what, "remove model_info, the harness fills it in", where)


def counts(plan: LaunchPlan) -> Iterator[Finding]:
    """Groups fill a batch, and a group can be in flight."""
    assert plan.run is not None
    orchestrator = plan.run.orchestrator
    batch, group, inflight = orchestrator.batch_size, orchestrator.group_size, orchestrator.concurrency.max_inflight
    if batch and batch % group:
        what = f"batch_size ({batch}) is no multiple of group_size ({group})"
        yield red(ABOUT, what, "change one of them", plan.where("orchestrator.batch_size"))
    if inflight is not None and inflight < group:
        what = f"max_inflight ({inflight}) is less than group_size ({group})"
        yield red(ABOUT, what, "raise it", plan.where("orchestrator.concurrency.max_inflight"))
    if group == 1:
        what = "group_size is 1: every advantage is 0 and nothing is learned"
        yield red(ABOUT, what, "set orchestrator.group_size", plan.where("orchestrator.group_size"))
