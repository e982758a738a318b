"""The token check: a trial or sample in the wrong place stops the run before it trains; honest runs go on."""

import re
from dataclasses import replace

import pytest
from sabotages import SAMPLES_OF_TRIALS
from scripted_run import FAIL, FakeComponents, ScriptedRun, ScriptedTask

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.engines.local.rollouts.batch import Batches
from harbortrainer.errors import ProofError

pytestmark = pytest.mark.torch  # the weight update

TASKS = (ScriptedTask("a", [1.0, 0.0, 0.0, 0.0]), ScriptedTask("b", [1.0, 1.0, 0.0, 1.0], answer_len=4))
LATEST = {"rollout exchanged": 2, "groups trained again": 1}
"""Steps that may finish first: a group of another task, or a batch to repeat, comes later."""
MESSAGES = {
    "rollout exchanged": r"this trial is of task key key-\d in source scripted, but its group is of task key key-\d",
    "samples trained twice": r"its token \d+ is trained, but no untrained answer of this trial starts there",
    "groups trained again": r"this trial was trained in an earlier step",
    "tokens of another trial": r"its tokens? .*\d+",
    "first token untrained": r"its token \d+ is trained, but no untrained answer of this trial starts there",
    "last token untrained": r"token \d+ of \d+ of its answer at token \d+ is not trained",
    "last token cut off": r"its answer at token \d+ lacks its last 1 of \d+ tokens",
    "prompt token trained": r"its token \d+ is trained, but no untrained answer of this trial starts there",
}


@pytest.mark.parametrize("fault", SAMPLES_OF_TRIALS)
async def test_mixed_up_samples_stop_run_within_three_steps(fault: str, tmp_path) -> None:
    run = ScriptedRun(tmp_path, steps=4, components=FakeComponents(TASKS))
    message = re.compile(rf"^task [ab], trial trial-[ab]-\d+: {MESSAGES[fault]}")
    with SAMPLES_OF_TRIALS[fault](), pytest.raises(ProofError, match=message):
        await run.train()
    assert len(run.components.trained) <= LATEST.get(fault, 0)


HONEST = {
    "several turns": TASKS,
    "truncated": (
        ScriptedTask("a", [1.0, 0.0, 0.0, 0.0], answer_len=9),
        ScriptedTask("b", [1.0, 0.0] * 2, answer_len=15),
    ),
    "failed trials": (ScriptedTask("a", [1.0, FAIL, 0.0, FAIL]), ScriptedTask("b", [FAIL, 1.0, 0.0, 1.0])),
    "groups without signal": (ScriptedTask("a", [1.0] * 4), ScriptedTask("b", [1.0, 0.5, 0.5, 0.0])),
    "lost groups": (ScriptedTask("a", [FAIL] * 4), ScriptedTask("b", [1.0, 0.0, 0.0, 0.0])),
}


@pytest.mark.parametrize("algo", [Algo(), Algo(type="echo", roles={"user": {"alpha": 0.5}})], ids=["grpo", "echo"])
@pytest.mark.parametrize("case", HONEST)
async def test_honest_run_is_not_stopped(case: str, algo: Algo, tmp_path) -> None:
    components = FakeComponents(HONEST[case])
    components.algo = algo
    run = ScriptedRun(tmp_path, steps=4, components=components)
    await run.train()
    assert len(components.trained) == 4


async def test_equal_answers_to_equal_prompts_train_once_each(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial may get the same answer twice, each time as a branch of its own; the third copy is a fault."""
    components = FakeComponents(TASKS)
    real = FakeComponents.run

    async def run_twice(self: FakeComponents, index: int, *, seed: int | None = None):
        episode = await real(self, index, seed=seed)
        (trace,) = episode.traces
        count = len(trace.nodes)
        for node in list(trace.nodes):
            trace.nodes.append(node.model_copy(update={"parent": None if node.parent is None else node.parent + count}))
        for completion in self.completion_log.peek(trace.id):
            self.completion_log.add(replace(completion))
        return episode

    monkeypatch.setattr(FakeComponents, "run", run_twice)
    run = ScriptedRun(tmp_path / "honest", steps=2, components=components)
    await run.train()
    assert len(components.trained) == 2
    cut = Batches.cut
    monkeypatch.setattr(
        Batches, "cut", lambda self, step: replace(batch := cut(self, step), samples=[*batch.samples, batch.samples[0]])
    )
    with pytest.raises(ProofError, match="no untrained answer of this trial starts there"):
        await ScriptedRun(tmp_path / "fault", steps=2, components=FakeComponents(TASKS)).train()
