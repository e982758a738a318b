"""Whether Harbor has an agent of the name that the run says. A class of the user's is told by its first trial."""

from collections.abc import Iterator
from difflib import get_close_matches

from harbortrainer.config.agent_table import is_class
from harbortrainer.doctor.finding import Finding, red
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Red for a name that the Harbor of here does not have. Prime-RL's environment has one of its own: it is not
    asked then."""
    for key, harness in plan.harnesses.items():
        if not plan.on_prime_rl and is_missing(harness.agent):
            yield red("agent", *_told(harness.agent), plan.where(f"{key}.agent"))


def refuse(agent: str, where: str) -> None:
    """Raise `UserError` for a name that the Harbor of here does not have; `where` is where it was said."""
    if is_missing(agent):
        what, do = _told(agent)
        raise UserError(what, where=where, do=do)


def is_missing(agent: str) -> bool:
    """Whether it is a name, and none of Harbor's."""
    return not is_class(agent) and agent.partition(":")[0] not in agents_of_harbor()


def _told(agent: str) -> tuple[str, str]:
    near = get_close_matches(agent, agents_of_harbor(), n=1)
    do = f"write {near[0]!r}" if near else "take one of docs/agents.md, or module:Class"
    return f"the Harbor of here has no agent {agent!r}", do


def agents_of_harbor() -> list[str]:
    """Their names. Imports a small part of Harbor."""
    from harbor.models.agent.name import AgentName

    return [agent.value for agent in AgentName]
