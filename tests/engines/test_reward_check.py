"""The reward check: a wrong reward or advantage stops the run before it trains."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from scripted_run import FakeComponents, ScriptedRun, ScriptedTask

from harbortrainer.config.algorithm_config import Algo, LengthPenalty
from harbortrainer.engines.local import rollout_client
from harbortrainer.engines.local.rollouts import group as groups
from harbortrainer.engines.local.rollouts.batch import Batches
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.errors import ProofError

pytestmark = pytest.mark.torch  # the weight update

TASKS = (ScriptedTask("a", [1.0, 0.0, 0.0, 0.0]), ScriptedTask("b", [1.0, 1.0, 0.0, 1.0]))


ALGORITHMS = {
    "plain": Algo(),
    "length penalty": Algo(length_penalty=LengthPenalty()),
    "length-weighted baseline": Algo(length_weighted_baseline=True),
}
each_algorithm = pytest.mark.parametrize("algo", ALGORITHMS.values(), ids=ALGORITHMS)


def small_run(folder, algo: Algo | None = None) -> ScriptedRun:
    components = FakeComponents(TASKS)
    components.algo = algo or Algo()
    return ScriptedRun(folder, steps=2, components=components)


def change_rewards(change: Callable[[float], float]):
    """Return a sabotage that changes each reward when the loop receives it."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        real = rollout_client.fill_rollout

        def forged(*args, **kwargs):
            rollout = real(*args, **kwargs)
            rollout.reward = None if rollout.reward is None else change(rollout.reward)
            return rollout

        monkeypatch.setattr(rollout_client, "fill_rollout", forged)

    return sabotage


def permute_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Batches.add

    def forged(self: Batches, group: Group, **options: bool) -> None:
        rewards = [rollout.reward for rollout in group.rollouts]
        for rollout, reward in zip(group.rollouts, rewards[1:] + rewards[:1], strict=True):
            rollout.reward = reward
        real(self, group, **options)

    monkeypatch.setattr(Batches, "add", forged)


def permute_rewards_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each trial the reward and the reward snapshot of another one."""
    real = Batches.add

    def forged(self: Batches, group: Group, **options: bool) -> None:
        pairs = [(rollout.reward, rollout.reward_snapshot) for rollout in group.rollouts]
        for rollout, (reward, reward_snapshot) in zip(group.rollouts, pairs[1:] + pairs[:1], strict=True):
            rollout.reward, rollout.reward_snapshot = reward, reward_snapshot
        real(self, group, **options)

    monkeypatch.setattr(Batches, "add", forged)


def change_trace_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment server return other rewards than the trial's record has."""
    real = FakeComponents.run

    async def forged(self: FakeComponents, index: int, *, seed: int | None = None):
        episode = await real(self, index, seed=seed)
        for trace in episode.traces:
            for reward in trace.rewards.values():
                assert reward is not None
                reward.score = 1.0 - reward.score
        return episode

    monkeypatch.setattr(FakeComponents, "run", forged)


def rescale_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = groups.group_advantages
    monkeypatch.setattr(groups, "group_advantages", lambda *a, **kw: [2 * value for value in real(*a, **kw)])


def change_samples(change: Callable[[list], list]):
    """Return a sabotage that changes the samples of a finished batch."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Batches.cut

        def forged(self: Batches, step: int):
            batch = real(self, step)
            return replace(batch, samples=change(batch.samples))

        monkeypatch.setattr(Batches, "cut", forged)

    return sabotage


def permute_advantages(samples: list) -> list:
    values = [sample.advantage for sample in samples]
    return [replace(s, advantage=value) for s, value in zip(samples, values[1:] + values[:1], strict=True)]


SABOTAGES = {
    "rewards permuted": permute_rewards,
    "rewards permuted with their records": permute_rewards_and_records,
    "rewards flipped": change_rewards(lambda reward: 1.0 - reward),
    "rewards rescaled": change_rewards(lambda reward: 2.0 * reward),
    "rewards shifted": change_rewards(lambda reward: reward + 0.5),
    "rewards changed by the environment server": change_trace_rewards,
    "advantages permuted": change_samples(permute_advantages),
    "advantages flipped": change_samples(lambda samples: [replace(s, advantage=-s.advantage) for s in samples]),
    "advantages rescaled": rescale_advantages,
    "a sample dropped": change_samples(lambda samples: samples[1:]),
    "a sample of an unknown trial": change_samples(lambda samples: [replace(s, trial_name="unknown") for s in samples]),
}


@each_algorithm
@pytest.mark.parametrize("name", SABOTAGES)
async def test_wrong_reward_stops_run_before_first_step(name, algo, tmp_path, monkeypatch):
    SABOTAGES[name](monkeypatch)
    run = small_run(tmp_path, algo)
    with pytest.raises(ProofError, match=r"trial trial-[ab]-\d+|trial unknown") as error:
        await run.train()
    assert "\n" not in str(error.value)
    assert run.components.trained == []
    assert not run.folder.metrics_file.exists()


async def test_rewards_that_cancel_out_do_not_stop_run(tmp_path):
    rewards = {"cancels": [0.1, 0.2, -0.3, 0.0], "b": [1.0, 0.0, 1.0, 0.0]}
    components = FakeComponents([ScriptedTask(name, own) for name, own in rewards.items()])
    components.algo = Algo(type="max_rl")
    run = ScriptedRun(tmp_path, steps=2, components=components)
    await run.train()
    assert len(components.trained) == 2


@each_algorithm
async def test_correct_rewards_do_not_stop_run(algo, tmp_path):
    run = small_run(tmp_path, algo)
    await run.train()
    assert len(run.components.trained) == run.steps


async def test_reward_must_match_harbor_result(tmp_path, monkeypatch):
    """If the trial folder is kept, Harbor's `result.json` in it is compared too."""
    real = FakeComponents.run

    async def run_and_keep_folder(self: FakeComponents, index: int, *, seed: int | None = None):
        episode = await real(self, index, seed=seed)
        (trace,) = episode.traces
        folder = tmp_path / "trials" / trace.id
        folder.mkdir(parents=True)
        rewards = {"reward": 0.0 if trace.id == "a-0" else trace.info["harbor"]["reward"]}
        (folder / "result.json").write_text(json.dumps({"verifier_result": {"rewards": rewards}}))
        trace.info["harbor"]["trial_dir"] = str(folder)
        return episode

    monkeypatch.setattr(FakeComponents, "run", run_and_keep_folder)
    run = small_run(tmp_path)
    with pytest.raises(ProofError, match=r"trial trial-a-0: its rewards are {'reward': 1.0}, but Harbor's result says"):
        await run.train()


def set_reward_0(monkeypatch: pytest.MonkeyPatch, outcome: str, changed_tools: Sequence[str] = ()) -> None:
    """Give the first trial of task b this outcome and reward 0; its verifier gave 1.0."""
    real = FakeComponents.run

    async def run_with_reward_0(self: FakeComponents, index: int, *, seed: int | None = None):
        episode = await real(self, index, seed=seed)
        (trace,) = episode.traces
        if trace.id == "b-0":
            trace.info["harbor"] |= {"outcome": outcome, "reward": 0.0, "changed_tools": list(changed_tools)}
            (reward,) = trace.rewards.values()
            assert reward is not None
            reward.score = 0.0
        return episode

    monkeypatch.setattr(FakeComponents, "run", run_with_reward_0)


async def test_timeout_may_have_reward_0(tmp_path, monkeypatch):
    set_reward_0(monkeypatch, "agent_timeout")
    run = small_run(tmp_path)
    await run.train()
    assert len(run.components.trained) == run.steps


async def test_trial_with_changed_tools_may_have_reward_0(tmp_path, monkeypatch):
    """`on_tampering = "zero"` keeps the outcome and the verifier's rewards in the record."""
    set_reward_0(monkeypatch, "completed", ["python3 was replaced"])
    run = small_run(tmp_path)
    await run.train()
    assert len(run.components.trained) == run.steps


async def test_other_trial_may_not_have_reward_0(tmp_path, monkeypatch):
    set_reward_0(monkeypatch, "completed")
    with pytest.raises(ProofError, match=r"trial trial-b-0: its reward is 0.0, but its verifier gave 1.0"):
        await small_run(tmp_path).train()


async def test_message_has_task_trial_and_both_values(tmp_path, monkeypatch):
    change_rewards(lambda reward: 2.0 * reward)(monkeypatch)
    with pytest.raises(
        ProofError, match=r"^task [ab], trial trial-[ab]-\d+: its reward is 2.0, but its record says 1.0"
    ):
        await small_run(tmp_path).train()
