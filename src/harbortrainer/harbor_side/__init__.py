"""All that this project knows of Harbor's private side; nothing else of it may touch that.

Private are names with a leading underscore, overridden methods that are not documented as an interface, and what
differs between the releases. The others import from here what has a public name. Here is what needs no Harbor to be
imported; `terminus` holds Terminus-2 and its terminal, `sandboxes` Harbor's environments.

Written for the releases of `WRITTEN_FOR`; `tests/harbor_side` has a test for each coupling.
Invariant: importing this module imports neither harbor nor litellm.
"""

import os
from functools import cache
from typing import TYPE_CHECKING

from harbortrainer.couplings import Couplings

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.llms.base import BaseLLM

WRITTEN_FOR = "0.21.* or 0.24"

_TERMINUS = "harbor.agents.terminus_2.terminus_2:Terminus2."
_TMUX = "harbor.agents.terminus_2.tmux_session:TmuxSession."
_FIELDS = (
    "_llm _model_name _chat _context _session _session_id _pending_completion _trajectory_steps _n_episodes "
    "_max_episodes _extra_env"
)
_ENVIRONMENT = "harbor.environments.base:BaseEnvironment."

TERMINUS = Couplings(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_side.terminus",
    places=(
        f"{_TERMINUS}_init_llm",
        f"{_TERMINUS}_get_parser()",
        f"{_TERMINUS}_query_llm.__wrapped__(chat, prompt, original_instruction, session)",
        f"{_TERMINUS}_handle_llm_interaction(chat, prompt, original_instruction, session)",
        f"{_TERMINUS}_execute_commands(commands, session)",
        f"{_TERMINUS}_limit_output_length(output, ...)",
        f"{_TERMINUS}_dump_trajectory()",
        *(_TERMINUS + name for name in _FIELDS.split()),
        f"{_TMUX}_send_keys_command(keys)",
        f"{_TMUX}_key_requires_paste(key)",
        f"{_TMUX}_find_new_content(current_buffer)",
        *(_TMUX + name for name in ["_tmux_start_session", "_session_name", "_previous_buffer", "_user"]),
    ),
)
TRIALS = Couplings(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_side",
    places=(
        f"{_ENVIRONMENT}_empty_dirs_command(dirs, chmod)",
        f"{_ENVIRONMENT}_reset_dirs_user()",
        "harbor.trial.trial:Trial._run_agent_phase",
        "harbor.trial.trial:Trial._load_task",
    ),
)
DOWNLOADS = Couplings(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_side.task_downloads",
    places=(
        "harbor.tasks.client:TaskClient._copy_task_source_to_target",
        "harbor.registry.client.git_repo:GitRepoRegistryClient._get_resolved_sha()",
        "harbor.registry.client.git_repo:ResolvedRepo(host, org, name, git_url, ref, resolved_sha, subdir)",
    ),
)

LITELLM_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables of every process that imports Harbor: without a network the LiteLLM that it imports would try to download
its price list, again and again."""


def keep_litellm_offline() -> None:
    """Set `LITELLM_OFFLINE` for this process and its children, before it imports Harbor."""
    for name, value in LITELLM_OFFLINE.items():
        os.environ.setdefault(name, value)


@cache
def prepare() -> None:
    """What comes before Harbor is used in this process. Raises `UserError` when its private side has changed."""
    keep_litellm_offline()
    TRIALS.check()


def raised_by_the_agent(traceback: str) -> bool:
    """Whether an exception that Harbor recorded came out of the agent's run: Harbor's method around it stands in the
    stack trace of what the agent raised, and only there."""
    return "in _run_agent_phase" in traceback


def raised_by_the_task(function_names: list[str]) -> bool:
    """Whether `Trial.create` failed when it read the task, by the names of the functions on the stack."""
    return "_load_task" in function_names


def client_of(agent: "BaseAgent") -> "BaseLLM | None":
    """The model's client of a Terminus-2; None for other agents, whatever they call by that name."""
    from harbor.llms.base import BaseLLM

    client = getattr(agent, "_llm", None)
    return client if isinstance(client, BaseLLM) else None


def answers_in_chat(agent: "BaseAgent") -> int | None:
    """How many answers the chat of a Terminus-2 holds; None before its first run, and for other agents."""
    from harbor.llms.chat import Chat

    chat = getattr(agent, "_chat", None)
    return None if not isinstance(chat, Chat) else sum(message["role"] == "assistant" for message in chat.messages)
