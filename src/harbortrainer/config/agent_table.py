"""Harbor's agents: where each runs, its API dialect, and its form of the model's name.

Covers the agents of Harbor 0.21 to 0.26. Does not import Harbor, so that an unsupported agent is reported at once.
`docs/agents.md` has the table for users.
"""

from dataclasses import dataclass
from typing import Literal

TRAINABLE_TERMINUS = "harbortrainer.trials.agent:TrainableTerminus2"

PLAIN_AGENT = "harbortrainer.trials.plain_agent:PlainAgent"
SHORT_NAMES = {"plain": PLAIN_AGENT}
"""This project's names of agents that Harbor does not have."""

OUR_AGENTS = frozenset({TRAINABLE_TERMINUS, PLAIN_AGENT})
IN_THIS_PROCESS = OUR_AGENTS | {"terminus-2"}
"""Agents that call verifiers' endpoint from this process, and take Terminus-2's arguments about the model."""
WITHOUT_MODEL = frozenset({"oracle", "nop"})
OWN_SERVICE = frozenset(
    {
        *("antigravity-cli", "antigravity-sdk", "copilot-cli", "cortex-code", "cursor-cli", "devin", "gemini-cli"),
        *("fx", "fx-dev", "grok-build", "junie", "rovodev-cli"),
    }
)
"""Agents that use only their vendor's service or its protocol."""
_OF_THE_RUN = (
    "takes API key and address from the environment of the run, not of a trial, before Harbor 0.25, and was not tried "
    "with later releases"
)
UNSUPPORTED_AGENTS = {
    "cline-cli": "gives it an API key but no model address",
    "computer-1": "shows its model a screen",
    "dspy-rlm": _OF_THE_RUN,
    "fabric": "needs NeMo Fabric on this machine and an adapter of it in each task",
    "hermes": _OF_THE_RUN,
}
"""Agents that a trial cannot configure with its model, and why (a clause about Harbor's class)."""

type Dialect = Literal["chat completions", "responses", "messages"]


@dataclass(frozen=True)
class AgentEntry:
    """A Harbor agent that runs inside the sandbox."""

    speaks: Dialect | None = "chat completions"
    """API dialect of the agent as configured here; None if unknown, then it gets the settings of all dialects."""
    model: str = "openai/{}"
    """Format of the model's name."""
    program: str = ""
    """Name on the PATH or path of the installed agent in a sandbox; empty if unknown."""
    variables: tuple[tuple[str, str], ...] = ()
    """Further environment variables. `{base_url}` and `{api_key}` are the model's; `{host}` is the URL without /v1."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Further arguments of the agent class, with the same placeholders."""


UNKNOWN = AgentEntry(None)
"""Defaults for a Harbor agent that is not in the table."""
UNKNOWN_CLASS = AgentEntry(None, model="{}")
"""Defaults for an agent class that is not Harbor's."""
_ACP = "acp:"

AGENTS = {
    # Harbor removes the first part; the rest must start with openai/ for LiteLLM.
    "aider": AgentEntry(model="openai/openai/{}", program="aider"),
    "claude-code": AgentEntry("messages", model="{}", program="claude"),
    "code-puppy": AgentEntry(program="code-puppy"),
    # Otherwise it may use the user's OpenAI subscription; `agent_model` does the same for Claude.
    "codex": AgentEntry(
        "responses", program="codex", variables=(("CODEX_AUTH_JSON_PATH", ""), ("CODEX_FORCE_AUTH_JSON", "fAlSe"))
    ),
    "deerflow": AgentEntry(),
    # The user's project selects the model. Without auto_env, Harbor's class would pass the user's API keys.
    "eve": AgentEntry(None, arguments=(("auto_env", "false"),)),
    # Versions without OPENAI_BASE_URL call OpenAI unless these variables are set.
    "goose": AgentEntry(
        program="goose", variables=(("OPENAI_HOST", "{host}"), ("OPENAI_BASE_PATH", "v1/chat/completions"))
    ),
    # Its class removes key and address from the environment before it starts the program.
    "kimi-cli": AgentEntry(program="kimi", arguments=(("base_url", "{base_url}"), ("api_key", "{api_key}"))),
    "kimi-code": AgentEntry(
        model="{}",
        program="kimi",
        variables=(("KIMI_MODEL_BASE_URL", "{base_url}"), ("KIMI_MODEL_API_KEY", "{api_key}")),
    ),
    # The user's graph selects the model.
    "langgraph": AgentEntry(None),
    "mcode": AgentEntry(program="mcode"),
    "mimo": AgentEntry(program="mimo"),
    "mini-swe-agent": AgentEntry(program="mini-swe-agent"),
    # It reads only these variables.
    "muse-code": AgentEntry(
        "responses",
        model="{}",
        program="muse",
        variables=(("MUSE_CODE_BASE_URL", "{base_url}"), ("META_API_KEY", "{api_key}")),
    ),
    # Otherwise it calls NVIDIA.
    "nemo-agent": AgentEntry(arguments=(("llm_type", "openai"),)),
    # It accepts only this level for an unknown model; Harbor's class sets a high one.
    "openclaw": AgentEntry(program="openclaw", arguments=(("thinking", "off"),)),
    "opencode": AgentEntry(program="opencode"),
    "opencode-v2": AgentEntry(program="opencode2"),
    "openhands": AgentEntry(program="/opt/openhands-venv/bin/python"),
    "openhands-sdk": AgentEntry(),
    # In Harbor 0.24 it needs the dialect of the address. In 0.21 it ignores the address.
    "pi": AgentEntry(program="pi", arguments=(("model_api", "openai-completions"),)),
    "qwen-coder": AgentEntry(model="{}", program="qwen"),
    "strands": AgentEntry(),
    # With a cost limit it stops after one answer of a model with an unknown price.
    "swe-agent": AgentEntry(
        program="sweagent",
        arguments=(("per_instance_cost_limit", "0"), ("total_cost_limit", "0"), ("max_input_tokens", "0")),
    ),
    "trae-agent": AgentEntry("responses", program="trae-cli"),
    # Otherwise it calls Mistral.
    "vibe": AgentEntry(program="vibe", variables=(("VIBE_BACKEND", "generic"),)),
}


def needs_proxy(agent: str) -> bool:
    """Return whether an agent needs the model proxy, because it may run inside the sandbox.

    Args:
        agent: Harbor's name, or `module:Class`.
    """
    return agent not in IN_THIS_PROCESS | WITHOUT_MODEL


def is_class(agent: str) -> bool:
    """Return whether `agent` is `module:Class`. `acp:NAME` is a Harbor name for an agent of the ACP registry.

    Args:
        agent: Harbor's name, or `module:Class`.
    """
    return ":" in agent and not agent.startswith(_ACP)
