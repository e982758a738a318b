"""Use of an agent that is already installed in the sandbox, and named errors for one that cannot be installed.

Harbor installs its agents from the network into each new sandbox. That takes minutes and is impossible without a
network.
"""

from typing import TYPE_CHECKING

from harbor.agents.installed.base import BaseInstalledAgent

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment

# The same search paths as in Harbor's agents.
_FIND = 'export PATH="$HOME/.local/bin:$PATH"; [ -s ~/.nvm/nvm.sh ] && . ~/.nvm/nvm.sh; command -v {}'


class AgentNotInstalledError(RuntimeError):
    """The agent is not in the sandbox and could not be installed."""


class AgentMissingError(AgentNotInstalledError):
    """The agent is not in the sandbox, which has no network; a retry would fail too."""


def reuse_installed_agent(agent: "BaseAgent", program: str) -> None:
    """Make the agent's setup skip the installation if its program is already in the sandbox.

    Args:
        agent: A Harbor agent, made for one trial.
        program: Name of its program on the PATH; "" if unknown.
    """
    if not isinstance(agent, BaseInstalledAgent):
        return
    install = agent.install

    async def install_if_missing(environment: "BaseEnvironment") -> None:
        if program and (await environment.exec(_FIND.format(program))).return_code == 0:
            return
        try:
            await install(environment)
        except RuntimeError as error:
            remedy = f": install {program} in the task's image" if program else ""
            error_type = AgentMissingError if _has_no_network(environment) else AgentNotInstalledError
            raise error_type(f"{agent.name()} could not be installed in the sandbox{remedy} ({error})") from error

    setattr(agent, "install", install_if_missing)  # noqa: B010 - this object only, not its class


def _has_no_network(environment: "BaseEnvironment") -> bool:
    from harbor.models.task.config import NetworkMode

    return environment.network_policy.network_mode is NetworkMode.NO_NETWORK
