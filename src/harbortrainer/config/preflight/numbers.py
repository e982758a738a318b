"""Numbers against each other: what fits into what."""

from collections.abc import Iterator

from harbortrainer.config.preflight.facts import MAX_INFLIGHT, Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow

SEQ_LEN = 2048
ABOUT = "numbers"


def check(facts: Facts) -> Iterator[Finding]:
    """seq_len, max_model_len, max_completion_tokens, model_info; batch, group and parallel trials."""
    if facts.raw is None:
        return
    found = [*lengths(facts), *counts(facts)]
    yield from found
    if not found:
        yield green(ABOUT, "seq_len, max_model_len, max_completion_tokens, batch and group fit")


def lengths(facts: Facts) -> Iterator[Finding]:
    """A sample holds a whole trial; an answer leaves room for its prompt."""
    seq_len = int(facts.get("orchestrator.seq_len", facts.get("seq_len", SEQ_LEN)))
    model_len = facts.get("inference.vllm.max_model_len")
    context = int(model_len) if model_len else seq_len
    answer = facts.get("orchestrator.train.sampling.max_completion_tokens")
    if model_len and context > seq_len:
        what = f"max_model_len ({context}) is more than seq_len ({seq_len}): longer trials are cut before training"
        yield yellow(ABOUT, what, "set seq_len to max_model_len")
    if answer and int(answer) >= context:
        what = f"max_completion_tokens ({answer}) leaves no room for a prompt in {context} tokens"
        yield red(ABOUT, what, "lower it")
    for harness in facts.harnesses:
        told = ((harness.get("agent_kwargs") or {}).get("model_info") or {}).get("max_input_tokens")
        if told and int(told) > context:
            what = f"model_info tells the agent of {told} input tokens, the model has {context}"
            yield red(ABOUT, what, "remove model_info, the harness fills it in")


def counts(facts: Facts) -> Iterator[Finding]:
    """Groups fill a batch, and a group can be in flight."""
    batch, group = facts.get("orchestrator.batch_size"), int(facts.get("orchestrator.group_size", 1))
    inflight = int(facts.get("orchestrator.concurrency.max_inflight", MAX_INFLIGHT))
    if batch and int(batch) % group:
        yield red(ABOUT, f"batch_size ({batch}) is no multiple of group_size ({group})", "change one of them")
    if inflight < group:
        yield red(ABOUT, f"max_inflight ({inflight}) is less than group_size ({group})", "raise it")
    if group == 1:
        yield red(ABOUT, "group_size is 1: every advantage is 0 and nothing is learned", "set orchestrator.group_size")
