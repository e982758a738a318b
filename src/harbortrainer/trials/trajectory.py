"""Writes Terminus-2's trajectory (ATIF) once, in a thread. Blocks: call it with `asyncio.to_thread`.

Harbor's own writer runs a regular expression over the whole text, which holds the interpreter for seconds
when there are token ids. Ours has none to format: they are kept by the client.
"""

import json
from typing import TYPE_CHECKING

from harbor.models.agent import context as harbor_context
from harbor.models.agent.context import AgentContext
from harbor.models.trajectories import Agent, FinalMetrics, Trajectory

# AgentContext's field and the class of its values, since Harbor 0.24.
_MODEL_USAGE = "model_usage"

if TYPE_CHECKING:
    from harbor.agents.terminus_2.terminus_2 import Terminus2


def write(agent: "Terminus2") -> None:
    """Write `trajectory.json` into the agent's folder; nothing when the agent never began."""
    context = agent._context
    if context is None or not agent._trajectory_steps:
        return
    trajectory = Trajectory(
        session_id=agent._session_id,
        agent=Agent(name=agent.name(), version=agent.version() or "unknown", model_name=agent._model_name),
        steps=agent._trajectory_steps,
        final_metrics=FinalMetrics(
            total_prompt_tokens=context.n_input_tokens,
            total_completion_tokens=context.n_output_tokens,
            total_cached_tokens=context.n_cache_tokens or 0,
            total_cost_usd=context.cost_usd or None,
        ),
    )
    text = json.dumps(trajectory.to_json_dict(), ensure_ascii=False)
    (agent.logs_dir / "trajectory.json").write_text(text, encoding="utf-8")


def note_usage(context: AgentContext, model: str) -> None:
    """Say which model used the tokens: otherwise Harbor 0.24 reads the trajectory again to find out."""
    if not hasattr(harbor_context, "ModelUsage"):  # before 0.24
        return
    usage = harbor_context.ModelUsage(
        n_input_tokens=context.n_input_tokens or 0,
        n_cache_tokens=context.n_cache_tokens or 0,
        n_output_tokens=context.n_output_tokens or 0,
        cost_usd=context.cost_usd,
    )
    setattr(context, _MODEL_USAGE, {model: usage})
