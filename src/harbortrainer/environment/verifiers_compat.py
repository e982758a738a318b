"""All use of verifiers' private API, and all differences between its releases.

Written for `WRITTEN_FOR`. `PRIVATE_APIS` lists the private names. No other module may use them. Invariant: importing
this module imports neither harbor nor torch, and no server.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Protocol

from renderers.base import RenderedTokens
from verifiers.v1 import graph
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig, resolve_api_key
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.trace import ModelCall, Trace
from verifiers.v1.types import Message, Response

from harbortrainer.private_apis import PrivateApi
from harbortrainer.runs.trace_transcript import as_list
from harbortrainer.trials.model_calls import AgentCall, CallStatus, is_prompt_too_long
from harbortrainer.trials.tokens import find_completion_fault

if TYPE_CHECKING:
    from verifiers.v1.clients.train import ElasticRendererPool
    from verifiers.v1.trace import WireTrace
    from verifiers.v1.types import SamplingConfig
else:
    try:
        from verifiers.v1.configs.sampling import SamplingConfig  # 0.4.1
    except ImportError:
        from verifiers.v1.types import SamplingConfig

WRITTEN_FOR = "0.3.1.dev62, 0.4.0 or 0.4.1.dev86"

PRIVATE_APIS = PrivateApi(
    library="verifiers",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.environment.verifiers_compat",
    places=(
        "verifiers.v1.graph:prepare_turn(trace, prompt, ...)",
        "verifiers.v1.graph:PendingTurn.commit(response, ...)",
        "verifiers.v1.trace:Trace.nodes",
        "verifiers.v1.trace:Trace.calls",
        "verifiers.v1.trace:ModelCall.node",
        "verifiers.v1.graph:MessageNode.sampled",
        "verifiers.v1.graph:MessageNode.mask",
        "verifiers.v1.graph:MessageNode.logprobs",
        "verifiers.v1.configs.client:resolve_api_key(config)",
        "verifiers.v1.clients.train:ElasticRendererPool.grow()",
        "verifiers.v1.clients.train:RendererSlot.lock",
        "verifiers.v1.clients.train:RendererSlot.renderer",
        "verifiers.v1.types:TurnTokens.message_spans",
        "verifiers.v1.types:TurnTokens.is_content",
        "verifiers.v1.configs.retries:RetryConfig.max_retries",
        "verifiers.v1.utils.loaders:resolve_env_config(data)",
        "verifiers.v1.configs.serve:pool_serve_kwargs(pool)",
        "verifiers.v1.serve:env_config_data(env)",
        "verifiers.v1.serve:serve_env(max_workers, address, address_queue, death_pipe, log_setup, ...)",
        "verifiers.v1.serve:EnvClient.run(client, model, sampling, task_data, ...)",
        "verifiers.v1.serve:EnvClient.wait_for_server_startup(timeout, interval)",
        "verifiers.v1.clients.train:TrainClient.get_response(dialect, body, sampling, ...)",
        "verifiers.v1.interception.server:InterceptionServer.start()",
        "verifiers.v1.interception.server:InterceptionServer.base_url",
        "verifiers.v1.interception.server:InterceptionServer.runner",
        "verifiers.v1.interception.server:InterceptionServer.stack",
        "verifiers.v1.session:RolloutSession.error",
        "verifiers.v1.session:RolloutSession.trace",
    ),
)


SALT = "cache_salt"
"""Request key of vLLM and Prime-RL that separates the cached blocks of policy versions."""

_PER_SAMPLED_TOKEN = {"kept_tokens", "sampling_mask", "top_logprobs", "weight_versions"}
"""Optional fields of a node with a row per sampled token; verifiers refuses another number of rows."""

# Invalid requests: a mistake of the agent, or settings that this server does not know.
_REJECTED = (400, 413, 422)
_NON_ENGINE_ERRORS = ("OverlongPromptError", "TaskError", "HarnessError", "CancelledError")


class AddressReceiver(Protocol):
    """Receives the server's address once it is known, as a queue does."""

    def put(self, address: str, /) -> None: ...


class Parent(Protocol):
    """A pipe to the parent process: `recv` returns when the other end is closed and the server has to end."""

    def recv(self) -> object: ...


def commit_call(trace: Trace, prompt: list[Message], response: Response) -> None:
    """Commit one model call, with its tokens, to an open trace."""
    node = graph.prepare_turn(trace, prompt).commit(response)
    call = ModelCall(node=node, model=response.model, finish_reason=response.finish_reason, usage=response.usage)
    trace.calls.append(call)


def remove_sampled_tokens(trace: Trace, calls: list[ModelCall]) -> None:
    """Remove the sampled tokens of these calls from a sealed trace."""
    for call in calls:
        assert call.node is not None
        node = trace.nodes[call.node]
        node.sampled, node.mask, node.logprobs = False, [False] * len(node.token_ids), []
        for name in _PER_SAMPLED_TOKEN & type(node).model_fields.keys():
            setattr(node, name, None)
        call.node = None
    while calls and trace.nodes and not trace.nodes[-1].sampled:
        trace.nodes.pop()


def convert_arrays(trace: "WireTrace") -> None:
    """Replace the per-token numpy arrays of a received trace, which verifiers 0.4.1 has, with lists as in 0.4.0."""
    for node in trace.nodes:
        for name in ("token_ids", "mask", "is_content", "logprobs"):
            setattr(node, name, as_list(getattr(node, name)))


def total_tokens(trace: "WireTrace") -> int:
    """Return the length of a trace's final sequences, summed over branches, as Prime-RL's length penalty counts it.

    From 0.4.1 on, `num_total_tokens` of a trace counts tokens that branches share once.
    """
    return sum(branch.num_total_tokens for branch in trace.branches)


def agent_calls(trace: Trace, arrivals: Sequence[float]) -> list[AgentCall]:
    """Return the model calls of a trace by start time, including unanswered ones.

    Args:
        trace: Its `calls` are the finished calls.
        arrivals: Time at which each call reached the endpoint, just before it is forwarded; seconds since the epoch.
    """
    waiting, calls = sorted(arrivals), []
    for call in sorted(trace.calls, key=lambda call: call.time.start):
        begun = next((moment for moment in reversed(waiting) if moment <= call.time.start), None)
        if begun is not None:
            waiting.remove(begun)
        tokens = call.usage.completion_tokens if call.usage else 0
        error = f"{call.error.type}: {call.error.message}" if call.error else ""
        calls.append(AgentCall(call.time.start, call.time.end, _status(call), tokens, error))
    return sorted([*calls, *map(AgentCall, waiting)], key=lambda call: call.start)


def _status(call: ModelCall) -> CallStatus:
    if call.error is None:
        return "answered" if call.node is not None else "refused"
    if call.error.type == "ProviderError" and call.error.status_code in _REJECTED:
        # verifiers 0.4 has no separate error for a prompt that is too long.
        return "refused" if is_prompt_too_long(call.error.message) else "rejected"
    return "refused" if call.error.type in _NON_ENGINE_ERRORS else "failed"


def invalid_logprobs(trace: Trace) -> str:
    """Describe the first answer whose tokens and log-probabilities are invalid or do not match; "" if all are valid."""
    for number, node in enumerate((node for node in trace.nodes if node.sampled), start=1):
        sampled = [token for token, own in zip(as_list(node.token_ids), as_list(node.mask), strict=True) if own]
        if fault := find_completion_fault(sampled, as_list(node.logprobs)):
            return f"answer {number}: {fault}"
    return ""


def models_endpoint(ctx: ModelContext) -> tuple[str, dict[str, str]]:
    """Return the base URL of the model's server, which ends in /v1, and its request headers."""
    return ctx.client.base_url, {"Authorization": f"Bearer {resolve_api_key(ctx.client)}", **ctx.client.headers}


def is_training(ctx: ModelContext) -> bool:
    """Whether the sampled tokens are for training; evaluations use chat completions."""
    return isinstance(ctx.client, TrainClientConfig)


type BodyLocator = Callable[[list[int], list[int], str], RenderedTokens | None]
"""Render the next call's prompt and mark the message's body in it.

Takes prompt ids, answer ids and the message that the next call adds. Returns None if the renderer does not only append.
"""


async def load_renderer(ctx: ModelContext) -> None:
    """Load the model's renderer, as the first call would. Takes seconds; the process keeps it."""
    if (pool := _renderers(ctx)) is not None:
        await pool.grow()


def body_locator(ctx: ModelContext) -> BodyLocator | None:
    """Return the body locator of the model's renderer; None if `load_renderer` has not loaded one."""
    pool = _renderers(ctx)
    if pool is None or not pool.renderers:
        return None
    loaded = pool.renderers[0]

    def locate(prompt_ids: list[int], completion_ids: list[int], text: str) -> RenderedTokens | None:
        with loaded.lock:
            return loaded.renderer.bridge_to_next_turn(prompt_ids, completion_ids, [{"role": "user", "content": text}])

    return locate


def _renderers(ctx: ModelContext) -> "ElasticRendererPool | None":
    if not isinstance(ctx.client, TrainClientConfig):
        return None
    from verifiers.v1.clients.train import ElasticRendererPool

    sampling = ctx.sampling.model_dump(exclude_none=True)
    sampling |= sampling.get("extra_body") or {}  # verifiers 0.3 reads chat_template_kwargs from there
    return ElasticRendererPool(
        ctx.client.renderer_model_name or ctx.model,
        ctx.client.renderer,
        chat_template_kwargs=sampling.get("chat_template_kwargs"),
        multiplex=ctx.client.multiplex,
    )


def retries(error: type[Exception], count: int) -> RetryConfig:
    """Return retries for this error class only (a list of names in verifiers 0.3, rules in 0.4)."""
    name = error.__name__
    if "include" in RetryConfig.model_fields:
        return RetryConfig.model_validate({"max_retries": count, "include": [name]})
    return RetryConfig.model_validate({"rules": [{"type": name, "max_retries": count}]})


def agent_config(harness: HarnessConfig, retry: RetryConfig) -> AgentConfig:
    """Return the config of an agent in the server's process.

    Not validated: validation looks the harness up in this plugin, which is still being imported.
    """
    return AgentConfig.model_construct(harness=harness, runtime=SubprocessConfig(), retries=retry)


def scoring_keys(agent: AgentConfig) -> list[str]:
    """Return the keys that are set in the agent's table `scoring`, which verifiers has since 0.4.1."""
    scoring = getattr(agent, "scoring", None)
    return [] if scoring is None else sorted(scoring.model_fields_set)


def adapt_train_clients() -> None:
    """Make this process's model calls cost less CPU, and send `cache_salt` where vLLM reads it.

    Prime-RL sends the policy version as the salt, so that blocks of an older adapter are never reused. Release 0.3 of
    verifiers leaves it among the sampling parameters, where vLLM drops it; 0.4 puts it at the request's top level.
    """
    from renderers import client
    from verifiers.v1.clients.train import TrainClient

    from harbortrainer.environment.generate_requests import (
        over_aiohttp,
        without_loopback_http,
        without_repeated_headers,
        without_repeated_signatures,
    )

    PRIVATE_APIS.check_place("renderers.client:generate(client, renderer, messages, model, ...)")
    without_repeated_signatures()
    without_repeated_headers()
    without_loopback_http()
    if hasattr(client.generate, "__wrapped__"):
        return
    generate = over_aiohttp(client.generate)
    sends_salt = SALT in TrainClient.get_response.__code__.co_consts
    # `get_response` looks it up at each call.
    vars(client)["generate"] = generate if sends_salt else with_top_level_salt(generate)


def ignore_call_errors(decided: Callable[[Trace], bool]) -> None:
    """Make this process's rollouts ignore the error of the last model call, once the trace's outcome is decided.

    verifiers fails a rollout whose last call failed, whoever made it and when. A call that was in flight when the
    agent's time ended would discard the trial's reward.
    """
    from verifiers.v1.session import RolloutSession

    def get(session: RolloutSession) -> object:
        return None if decided(session.trace) else vars(session).get("error")

    def put(session: RolloutSession, error: object) -> None:
        vars(session)["error"] = error

    setattr(RolloutSession, "error", property(get, put))  # noqa: B010 - it replaces the field of a dataclass


def with_top_level_salt[T](generate: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wrap renderers' `generate`: move the salt from `sampling_params` to the argument `cache_salt`."""

    @wraps(generate)
    def call(*, sampling_params: Mapping[str, object] | None = None, **others: object) -> Awaitable[T]:
        plain = dict(sampling_params or {})
        salt = plain.pop(SALT, None)
        return generate(sampling_params=plain, **({SALT: salt} | others))

    return call


def with_flat_sampling(ctx: ModelContext) -> ModelContext:
    """Return the context with `extra_body` merged into the top level of the sampling, for evaluations.

    An evaluation's calls are forwarded unchanged. Release 0.3 of verifiers sends a key named `extra_body`, which
    servers ignore together with its content (the salt, `top_k`, `min_p`). Release 0.4 merges it itself.
    """
    sampling = ctx.sampling.model_dump(exclude_none=True)
    extra = sampling.pop("extra_body", None)
    if ctx.client.type != "eval" or not extra:
        return ctx
    return replace(ctx, sampling=SamplingConfig.model_validate(extra | sampling))


def serve(
    env: Mapping[str, object],
    table: Mapping[str, object],
    *,
    address: str,
    announce: AddressReceiver,
    parent: Parent,
    set_up: Callable[[], None],
    watch_workers: Callable[[], None],
) -> None:
    """Serve an environment from this process and its workers until the parent process ends.

    Args:
        env: The `env` table.
        table: The `serve` table.
        address: ZMQ address to bind. The server requires no key, so only a socket in a private folder keeps other
            users out.
        announce: Receives the address once it is bound.
        parent: Signals when to end.
        set_up: Called first in every worker.
        watch_workers: Called if there are worker processes.
    """
    from verifiers.v1.configs.serve import ServeConfig, pool_serve_kwargs
    from verifiers.v1.serve import env_config_data, serve_env
    from verifiers.v1.utils.loaders import resolve_env_config

    served = ServeConfig.model_validate(table)
    pool = pool_serve_kwargs(served.pool)
    if pool["max_workers"] != 1:  # a single one is this process
        watch_workers()
    serve_env(
        **pool,
        address=address,
        address_queue=announce,
        death_pipe=parent,
        log_setup=set_up,
        config_data=env_config_data(resolve_env_config(dict(env))),
        max_concurrent=served.max_concurrent,
    )
