"""The only package that uses Harbor's private API, for the releases in `WRITTEN_FOR`.

Private are names with a leading underscore, overridden methods that are no documented interface, and whatever differs
between releases. Other packages import public names from here:
- this module: what works before Harbor is imported
- `terminus`: Terminus-2 and its terminal
- `open_environment`, `compose_override`: Harbor's environments
- `task_hashes`: its hashes of a task
- `task_downloads`, `job_folder`: its registry clients and the files of its jobs

Each `PrivateApi` below lists what its module uses; `tests/harbor_compat` tests each place.
Invariant: importing this module imports neither harbor nor litellm.
"""

import contextlib
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.explain import explain
from harbortrainer.errors import parts_of
from harbortrainer.harbor_compat import task_hashes
from harbortrainer.private_apis import PrivateApi
from harbortrainer.tar_filter import use_for_all_archives

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment
    from harbor.llms.base import BaseLLM
    from harbor.models.trial.config import AgentConfig
    from harbor.trial.trial import Trial
    from pydantic import BaseModel

WRITTEN_FOR = "0.21.*, 0.24.*, 0.25 or 0.26"

_TERMINUS = "harbor.agents.terminus_2.terminus_2:Terminus2."
_TMUX = "harbor.agents.terminus_2.tmux_session:TmuxSession."
_FIELDS = (
    "_llm _model_name _chat _context _session _session_id _pending_completion _trajectory_steps _n_episodes "
    "_max_episodes _extra_env"
)
_ENVIRONMENT = "harbor.environments.base:BaseEnvironment."

TERMINUS = PrivateApi(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_compat.terminus",
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
TRIALS = PrivateApi(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_compat",
    places=(
        f"{_ENVIRONMENT}_empty_dirs_command(dirs, chmod)",
        f"{_ENVIRONMENT}_reset_dirs_user()",
        "harbor.trial.trial:Trial._run_agent_phase",
        "harbor.trial.trial:Trial._load_task",
        "harbor.trial.trial:Trial._scrub_jobs_dir()",
        "harbor.trial.trial:Trial._hooks",
        "harbor.trial.trial:resolve_env_vars(env_dict)",
        "harbor.environments.factory:EnvironmentFactory.create_environment_from_config",
    ),
)
DOWNLOADS = PrivateApi(
    library="harbor",
    written_for=WRITTEN_FOR,
    used_by="harbortrainer.harbor_compat.task_downloads",
    places=(
        "harbor.tasks.client:TaskClient._copy_task_source_to_target",
        "harbor.registry.client.git_repo:GitRepoRegistryClient._get_resolved_sha()",
        "harbor.registry.client.git_repo:ResolvedRepo(host, org, name, git_url, ref, resolved_sha, subdir)",
    ),
)

LITELLM_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Environment variables for every process that imports Harbor.

Without them, LiteLLM, which Harbor imports, retries the download of its price list for as long as there is no network.
"""


def keep_litellm_offline() -> None:
    """Set `LITELLM_OFFLINE` for this process and its children. Call it before importing Harbor."""
    for name, value in LITELLM_OFFLINE.items():
        os.environ.setdefault(name, value)


@cache
def prepare() -> None:
    """Prepare this process for using Harbor, which unpacks archives from sandboxes and registries.

    Raises:
        UserError: Harbor's private API has changed.
    """
    keep_litellm_offline()
    use_for_all_archives()
    TRIALS.check()
    task_hashes.keep_task_hashes()


@cache
def on_new_environment(call: "Callable[[BaseEnvironment], None]") -> None:
    """Call `call` with every environment that Harbor makes in this process from now on.

    A trial makes the environment of a separate verifier itself, while it runs.
    """
    from harbor.environments.factory import EnvironmentFactory

    make = EnvironmentFactory.create_environment_from_config

    @wraps(make)
    def make_and_call(*args: object, **named: object) -> "BaseEnvironment":
        environment = make(*args, **named)  # ty: ignore[invalid-argument-type]
        call(environment)
        return environment

    setattr(EnvironmentFactory, "create_environment_from_config", make_and_call)  # noqa: B010 - the type of the original


def options_with(parent: type, **options: tuple[type, object]) -> "type[BaseModel] | None":
    """Return the options model of a Harbor agent or environment with our own options added.

    Harbor refuses an option that its class does not declare: of agents since 0.24, of environments since 0.26.

    Args:
        parent: Harbor's class.
        options: Type and default of each option.

    Returns:
        The model; None if the class declares no options.
    """
    model = getattr(parent, "options_model", None)
    if model is None:
        return None
    defaults = {name: default for name, (_, default) in options.items()}
    fields = {"__module__": __name__, "__annotations__": {name: kind for name, (kind, _) in options.items()}}
    return type(model)(f"Trainable{model.__name__}", (model,), fields | defaults)


def accepts_base_url(agent: "AgentConfig") -> bool:
    """Whether Harbor passes the field `base_url` of this config to the agent: since 0.25, for most agents and settings.

    False for an agent that Harbor cannot make; Harbor reports the reason itself.
    """
    if "base_url" not in type(agent).model_fields:
        return False
    from harbor.agents import agent_auth_resolution  # ty: ignore[import-not-found]

    try:
        return agent_auth_resolution.resolve_agent_model_connection(agent).can_configure_base_url
    except Exception:  # noqa: BLE001 - of a user's class or file too
        return False


@cache
def separate_verifier_can_use_environment() -> bool:
    """Whether a separate verifier that defines no image gets the agent's, with the tests uploaded.

    So in Harbor 0.25. In 0.21 such a verifier cannot start, and no tests are uploaded to a separate one.
    """
    keep_litellm_offline()
    from harbor.models.task import verifier_mode

    return hasattr(verifier_mode, "resolve_verifier_environment_definition")


@cache
def docker_allocates_gpus() -> bool:
    """Whether Harbor's Docker environment gives a task the GPUs that it requests: since 0.25, in Linux containers."""
    keep_litellm_offline()
    from harbor.environments.docker.docker import DockerEnvironment

    class LinuxContainer:
        """The flags that the capabilities depend on, all false."""

        type = staticmethod(DockerEnvironment.type)

        def __getattr__(self, name: str) -> bool:
            return False

    capabilities = DockerEnvironment.capabilities
    assert isinstance(capabilities, property) and capabilities.fget is not None
    return capabilities.fget(LinuxContainer()).gpus  # ty: ignore[invalid-argument-type] - a stand-in


def task_refusal(folder: Path) -> str:
    """Return why Harbor refuses a task's files at the start of each trial; empty if it plays them.

    Harbor 0.21 requires test scripts and a valid task.toml. Since 0.25 links must also stay within the task, step names
    must be portable, and `.harborignore` must not exclude the test script.

    Args:
        folder: The task's folder.

    Raises:
        OSError: A file cannot be read.
    """
    keep_litellm_offline()
    from harbor.models.task.task import Task
    from pydantic import ValidationError

    try:
        with warnings.catch_warnings(action="ignore"):
            Task(folder)
    except ValidationError as error:
        return "; ".join(f"{one.where}: {one.what}" for one in parts_of(explain(error, "task.toml")))
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return ""


def without_grading(exceptions: Iterable[str]) -> dict[str, object]:
    """Return `TrialConfig` fields that keep Harbor from grading a trial after these exceptions.

    Since Harbor 0.26 a trial is graded after an exception that Harbor does not know, and its reward is valid. Earlier
    releases do not grade such a trial, and have no field for it.

    Args:
        exceptions: Type names.
    """
    from harbor.models.trial.config import TrialConfig

    field = "override_error_policy"
    policy = {"should_grade": False, "has_valid_reward": False}
    return {field: dict.fromkeys(sorted(exceptions), policy)} if field in TrialConfig.model_fields else {}


def raised_by_agent(traceback: str) -> bool:
    """Whether an exception that Harbor recorded was raised by the agent.

    Only then does the stack trace contain the Harbor method that runs the agent.
    """
    return "in _run_agent_phase" in traceback


def raised_reading_task(error: Exception) -> bool:
    """Whether Harbor failed to read the task, when it created or ran the trial; judged by the functions on the stack.

    A trial reads the task again for its checksum.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_task = Path("harbor", "models", "task").as_posix()
    return any(frame.name == "_load_task" or of_task in Path(frame.filename).as_posix() for frame in frames)


def llm_client(agent: "BaseAgent") -> "BaseLLM | None":
    """Return the model client of a Terminus-2; None for other agents, even if they have an attribute of that name."""
    from harbor.llms.base import BaseLLM

    client = getattr(agent, "_llm", None)
    return client if isinstance(client, BaseLLM) else None


def count_chat_answers(agent: "BaseAgent") -> int | None:
    """Count the model's answers in the chat of a Terminus-2; None before its first run and for other agents."""
    from harbor.llms.chat import Chat

    chat = getattr(agent, "_chat", None)
    return None if not isinstance(chat, Chat) else sum(message["role"] == "assistant" for message in chat.messages)


def forget_loggers(trial_name: str) -> None:
    """Remove the loggers that Harbor has named after an ended trial.

    A trial has about six of them, 5 kB. Python keeps every logger, so that a worker would grow with each trial.
    """
    loggers = logging.root.manager.loggerDict
    for name in [name for name in loggers if trial_name in name]:
        before, found, _ = f"{name}.".partition(f".{trial_name}.")
        if found:
            parent = f"{before}.{trial_name}".rpartition(".")[0]
            logging.getLogger(parent)  # a name without a logger of its own would list every trial below it
            del loggers[name]


def secret_values(trial: "Trial") -> set[str]:
    """Return the values of the trial's variables with secret names. Harbor redacts them in the trial's files."""
    from harbor.utils.env import is_sensitive_env_key, resolve_env_vars

    values: set[str] = set()
    for variables in (trial.agent.extra_env, trial.task.config.verifier.env, trial.config.verifier.env):
        for name in filter(is_sensitive_env_key, variables):
            with contextlib.suppress(ValueError):  # the host lacks it
                values |= set(resolve_env_vars({name: variables[name]}).values())
    return values


def redact_long_values(trial: "Trial", min_chars: int) -> None:
    """Keep short values of variables with secret names in the trial's files, where Harbor would redact each of them.

    For example, with `OPENAI_API_KEY=1` a reward of 1.0 would become "[REDACTED].0".

    Args:
        trial: The trial, before it runs.
        min_chars: Characters of the shortest redacted value.
    """
    import harbor.trial.trial as module

    redact, resolve = trial._scrub_jobs_dir, module.resolve_env_vars

    def resolve_long_values(env_dict: dict[str, str]) -> dict[str, str]:
        found = resolve(env_dict)
        if any(len(value) < min_chars for value in found.values()):
            raise ValueError("too short to be redacted")  # Harbor goes on with the next variable
        return found

    def redact_trial() -> None:
        setattr(module, "resolve_env_vars", resolve_long_values)  # noqa: B010 - the type of the module's own name
        try:
            redact()
        finally:
            module.resolve_env_vars = resolve

    setattr(trial, "_scrub_jobs_dir", redact_trial)  # noqa: B010 - this object only


def break_cycles(trial: "Trial", environments: Iterable["BaseEnvironment"]) -> None:
    """Remove from an ended trial's objects what refers back to them: replaced methods and hooks.

    Otherwise only the garbage collector frees the trial, its transcript and its tokens, and in a process with hundreds
    of trials in flight a collection of all objects takes seconds.

    Args:
        trial: The trial.
        environments: Its sandboxes.
    """
    for hooks in trial._hooks.values():
        hooks.clear()
    for changed in (trial, trial.agent, llm_client(trial.agent), *environments):
        if changed is None:
            continue
        for name, value in list(vars(changed).items()):
            if callable(value) and callable(getattr(type(changed), name, None)):
                delattr(changed, name)
