"""Whether ECHO has anything to predict."""

from collections.abc import Iterator

from harbortrainer.config.algo_table import NamedAlgo
from harbortrainer.config.plugin import TRAINABLE_TERMINUS
from harbortrainer.config.prime_rl_run import sources_of
from harbortrainer.doctor.finding import Finding, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan

TERMINUS = frozenset({TRAINABLE_TERMINUS, "terminus-2"})
"""Agents that are told of the terminal by messages of the user."""


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """`algo.type = "echo"` without the role that Terminus-2's terminal speaks in."""
    for key, algo in algorithms(plan):
        if algo.type == "echo" and "user" not in algo.role_weights:
            what = "Terminus-2 is told what its terminal says by messages of the user, and ECHO is not to predict them"
            yield yellow("algorithm", what, f"set {key}.roles.user = {{ alpha = 0.1 }}", plan.where(f"{key}.roles"))


def algorithms(plan: LaunchPlan) -> Iterator[tuple[str, NamedAlgo]]:
    """The algorithms that Terminus-2's trials train with, by their dotted keys; each once."""
    if plan.run is None:
        return
    default = "orchestrator.algo", plan.run.orchestrator.algo
    found = {}
    for key, source in sources_of(plan.run).items():
        harness = plan.harnesses.get(f"{key}.env.agent.harness")
        if key.startswith("orchestrator.train.") and harness is not None and harness.agent in TERMINUS:
            own = getattr(source, "algo", None)
            name, algo = (f"{key}.algo", own) if own else default
            found[name] = algo
    yield from found.items()
