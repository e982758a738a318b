"""Tests of how an agent ends after the rollout was stopped."""

import asyncio

import pytest
from patience import HANG_S

from harbortrainer.trials.runner import AgentStalledError, stop_gracefully


class Agent:
    """An agent that raises an error, hangs or returns."""

    def __init__(self, error: Exception | None = None, hangs_s: float = 0.0) -> None:
        self.error, self.hangs_s, self.cancelled = error, hangs_s, False

    async def run(self) -> None:
        try:
            await asyncio.sleep(self.hangs_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error

    async def resume(self) -> None:
        await self.run()


def with_graceful_stop(agent: Agent, stop: str | None) -> Agent:
    stop_gracefully(agent, lambda: stop, grace_s=0.05)
    return agent


async def test_error_without_stop_is_raised():
    with pytest.raises(RuntimeError, match="mine"):
        await with_graceful_stop(Agent(RuntimeError("mine")), None).run()


async def test_timeout_inside_agent_is_not_agent_timeout():
    with pytest.raises(AgentStalledError, match="socket"):
        await with_graceful_stop(Agent(TimeoutError("socket")), None).run()


async def test_error_after_rollout_error_is_raised():
    with pytest.raises(RuntimeError, match="mine"):
        await with_graceful_stop(Agent(RuntimeError("mine")), "error").run()


async def test_error_after_stop_ends_run():
    await with_graceful_stop(Agent(RuntimeError("400")), "max_turns").run()


async def test_agent_that_continues_after_stop_is_cancelled():
    agent = with_graceful_stop(Agent(hangs_s=600), "max_turns")
    async with asyncio.timeout(HANG_S):
        await agent.run()
    assert agent.cancelled


async def test_outer_timeout_cancels_agent():
    agent = with_graceful_stop(Agent(hangs_s=600), None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await agent.run()
    assert agent.cancelled
