"""From what verifiers knows of a rollout to the `TrialSpec` of its trial. Pure."""

from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

from harbortrainer.environment.config import HarborHarnessConfig
from harbortrainer.environment.taskset import HarborTaskData
from harbortrainer.trials.spec import ModelEndpoint, TrialSpec

# Log-probabilities mean something to the trainer only when nothing reshapes the distribution they belong to.
PLAIN_SAMPLING = {"temperature": 1.0, "top_k": -1, "min_p": 0.0}
_OPENAI_KEYS = ("temperature", "top_p", "max_tokens", "seed", "stop")


def trial_spec(
    config: HarborHarnessConfig,
    ctx: ModelContext,
    trace: Trace,
    data: HarborTaskData,
    endpoint: str,
    secret: str,
) -> TrialSpec:
    """The trial of one rollout.

    Args:
        endpoint: verifiers' interception endpoint (ends in /v1), used unless tokens are read from
            rollout_details.
        secret: Its bearer token.
    """
    direct = config.capture == "rollout_details"
    kwargs = config.agent_kwargs | (direct_kwargs(ctx.sampling, config.agent_kwargs) if direct else {})
    return TrialSpec(
        task_dir=data.path,
        task_key=data.task_key,
        trials_dir=config.trials_folder,
        trial_name=f"{(data.name or 'task')[:32]}__{trace.id[:12]}",
        agent=config.agent,
        agent_kwargs=kwargs,
        agent_env=config.resolved_env,
        model=direct_model(config, ctx) if direct else _model(ctx, ctx.model, endpoint, secret),
        max_turns=max_turns(config.max_turns, trace.agent.config.max_turns),
        environment_type=config.environment_type,
        environment_kwargs=config.environment_kwargs,
        timeout_multiplier=config.timeout_multiplier,
        keep_trials=config.keep_trials,
    )


def max_turns(*limits: int | None) -> int | None:
    """The smallest of the limits that are set."""
    return min((limit for limit in limits if limit is not None), default=None)


def direct_model(config: HarborHarnessConfig, ctx: ModelContext) -> ModelEndpoint:
    """The server that the agent calls itself."""
    assert config.vllm_base_url is not None, "the config's own check demands it"
    return _model(ctx, config.model_name or ctx.model, config.vllm_base_url, "EMPTY")


def direct_kwargs(sampling: SamplingConfig, own: dict[str, Any]) -> dict[str, Any]:
    """Terminus-2's arguments for calls that return token ids, with the run's sampling."""
    wanted = sampling.model_dump(exclude_none=True)
    wanted = PLAIN_SAMPLING | (wanted.pop("extra_body", None) or {}) | wanted
    extra = {key: wanted[key] for key in ("top_k", "min_p")}
    call = {key: wanted[key] for key in _OPENAI_KEYS if key in wanted and key != "temperature"}
    return {
        "collect_rollout_details": True,
        "temperature": wanted["temperature"],
        "llm_call_kwargs": {**own.get("llm_call_kwargs", {}), **call, "extra_body": extra},
    }


def _model(ctx: ModelContext, name: str, base_url: str, api_key: str) -> ModelEndpoint:
    fields: dict[str, Any] = {"output_limit": ctx.sampling.max_tokens}
    return ModelEndpoint.model_validate({"name": name, "base_url": base_url, "api_key": api_key, **fields})
