"""`/metrics` in Prometheus text, under vLLM's names where there is one: Prime-RL's orchestrator reads them."""

from harbortrainer.engines.local.sampler.engine import Engine

_NAMES = {
    "num_requests_running": ("gauge", "Requests in the engine."),
    "num_requests_waiting": ("gauge", "Requests that wait for a hand-over or a pause."),
    "kv_cache_usage_perc": ("gauge", "Share of the cache that running requests hold, 0 to 1."),
    "prompt_tokens_total": ("counter", "Tokens of finished prompts."),
    "generation_tokens_total": ("counter", "Tokens sampled."),
    "num_preemptions_total": ("counter", "Requests put back for lack of cache; not counted, always 0."),
}


def engine_stats(engine: Engine) -> dict[str, float]:
    """The numbers behind `/metrics` and `Sampler.stats()`."""
    used, size = engine.cache_tokens()
    counters = engine.counters
    return {
        "requests": counters.requests,
        "failed": counters.failed,
        "cancelled": counters.cancelled,
        "prompt_tokens": counters.prompt_tokens,
        "sampled_tokens": counters.sampled_tokens,
        "running": engine.running,
        "waiting": engine.gate.waiting,
        "cache_used_tokens": used,
        "cache_tokens": size,
        "version": engine.version,
        "handovers": counters.handovers,
        "handover_s": counters.handover_s,
        "handover_wait_s": counters.handover_wait_s,
        "handover_total_s": counters.handover_total_s,
    }


def prometheus(engine: Engine, model_name: str) -> str:
    """The text of `/metrics`."""
    stats = engine_stats(engine)
    values = {
        "num_requests_running": stats["running"],
        "num_requests_waiting": stats["waiting"],
        "kv_cache_usage_perc": min(1.0, stats["cache_used_tokens"] / max(1, stats["cache_tokens"])),
        "prompt_tokens_total": stats["prompt_tokens"],
        "generation_tokens_total": stats["sampled_tokens"],
        "num_preemptions_total": 0,
    }
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'{{engine="0",model_name="{escaped}"}}'
    lines = []
    for name, value in values.items():
        kind, text = _NAMES[name]
        family = f"vllm:{name}"
        lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}", f"{family}{labels} {value}"]
    lines += [
        "# HELP vllm:cache_config_info Size of the cache.",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{int(stats["cache_tokens"])}"}} 1',
        "# HELP harbortrainer_policy_version The policy version that samples now.",
        "# TYPE harbortrainer_policy_version gauge",
        f"harbortrainer_policy_version {int(stats['version'])}",
    ]
    return "\n".join(lines) + "\n"
