"""Each outcome in a real trial: Harbor's Trial, a local sandbox, a scripted model."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import DONE, SOLVED, Reply, Scripted, ScriptedModel, keys, make_task

from harbortrainer.errors import UserError
from harbortrainer.trials import ModelEndpoint, Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

SOLVE = keys("mkdir -p /app && touch /app/answer")
IDLE = keys("true")
SECRET = "sk-do-not-write-me-down"
UNREACHABLE_URL = "http://127.0.0.1:9/v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def run(folder: Path, script: list[Scripted], *, task: dict[str, Any] | None = None, **spec: Any) -> TrialRecord:
    """Write a task and run one trial of it, with a model that answers `script`."""
    task_dir = make_task(folder / "task", **(task or {}))
    async with ScriptedModel(script).serve() as model:
        return await run_trial(make_spec(folder, task_dir, model.url, **spec))


def make_spec(folder: Path, task_dir: Path, url: str, **spec: Any) -> TrialSpec:
    kwargs = spec.pop("agent_kwargs", {}) | ({} if "agent" in spec else {"model_retries": 1})
    endpoint = ModelEndpoint(name="scripted", base_url=url, api_key=SECRET)  # type: ignore[arg-type]
    return TrialSpec(task_dir=task_dir, trials_dir=folder / "trials", model=endpoint, agent_kwargs=kwargs, **spec)


async def test_solved_task_is_completed(folder):
    record = await run(folder, [SOLVE, DONE, DONE])
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0)
    assert record.turns == 3
    assert record.tokens.completion > 0
    assert record.timings.agent_execution is not None and record.timings.verifier is not None


async def test_auto_selects_local_for_supported_task(folder):
    record = await run(folder, [SOLVE, DONE, DONE], environment_type="auto", environment_kwargs={"image": "host"})
    assert (record.reward, record.environment_type) == (1.0, "local")


async def test_unsolved_task_is_completed_with_reward_zero(folder):
    record = await run(folder, ["this is no JSON", DONE, DONE])
    assert (record.outcome, record.reward, record.parse_errors) == (Outcome.completed, 0.0, 1)


@pytest.mark.parametrize(("first", "reward"), [(SOLVE, 1.0), (IDLE, 0.0)])
async def test_agent_timeout_keeps_verifier_reward(folder, first, reward):
    record = await run(folder, [first, Reply(content=IDLE, delay_s=30)], agent_timeout_s=1.5)
    assert (record.outcome, record.reward) == (Outcome.agent_timeout, reward)
    assert record.error is not None and record.error.type == "AgentTimeoutError"
    assert record.timings.model is not None and record.timings.agent_execution is not None
    assert 0.5 < record.timings.model <= record.timings.agent_execution


async def test_turn_limit_keeps_verifier_reward(folder):
    record = await run(folder, [SOLVE, IDLE], max_turns=2)
    assert (record.outcome, record.reward, record.turns) == (Outcome.turn_limit, 1.0, 2)


async def test_finishing_in_last_turn_is_not_turn_limit(folder):
    record = await run(folder, [SOLVE, DONE, DONE], max_turns=3)
    assert record.outcome is Outcome.completed


async def test_context_limit_keeps_verifier_reward(folder):
    too_long = Reply(status=400, error="This model's maximum context length is 32 tokens.")
    record = await run(folder, [SOLVE, too_long])
    assert (record.outcome, record.reward) == (Outcome.context_limit, 1.0)


@pytest.mark.parametrize(
    ("stop", "outcome"), [("max_turns", Outcome.turn_limit), ("context_length", Outcome.context_limit)]
)
async def test_rollout_stop_gives_matching_outcome(folder, stop, outcome):
    record = await run(folder, [SOLVE, Reply(status=400, error=f"rollout stopped: {stop}")])
    assert (record.outcome, record.reward) == (outcome, 1.0)


async def test_repeated_truncated_answers_are_output_limit(folder):
    cut = Reply(content='{"analysis": "and so on', cut=True)
    record = await run(folder, [SOLVE, cut], agent_kwargs={"max_cut_answers": 2})
    assert (record.outcome, record.reward) == (Outcome.output_limit, 1.0)


async def test_unreachable_model_server_is_model_error(folder):
    task = make_task(folder / "task")
    record = await run_trial(make_spec(folder, task, UNREACHABLE_URL))
    assert (record.outcome, record.reward) == (Outcome.model_error, None)
    assert record.error is not None and record.error.type == "ModelServerError"


async def test_model_server_answering_500_is_model_error(folder):
    record = await run(folder, [SOLVE, Reply(status=500, error="CUDA out of memory")])
    assert (record.outcome, record.reward) == (Outcome.model_error, None)
    assert record.error is not None and "CUDA out of memory" in record.error.message


async def test_unstartable_sandbox_is_sandbox_error(folder):
    record = await run(folder, [DONE], task={"dockerfile": "FROM debian:12-slim\nRUN exit 3\n"})
    assert (record.outcome, record.reward) == (Outcome.sandbox_error, None)


async def test_sandbox_that_dies_during_trial_is_sandbox_error(folder):
    record = await run(folder, [SOLVE, IDLE], environment_type="dying_environment:DyingEnvironment")
    assert (record.outcome, record.reward) == (Outcome.sandbox_error, None)


@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("true", "RewardFileNotFoundError"),
        ("echo NaN > /logs/verifier/reward.txt", None),
        ('echo \'{"reward": 1, "style": Infinity}\' > /logs/verifier/reward.json', None),
        ("echo 1e308 > /logs/verifier/reward.txt", "RewardOutOfBoundError"),
        ("echo -1000001 > /logs/verifier/reward.txt", "RewardOutOfBoundError"),
        ("echo lots > /logs/verifier/reward.txt", "VerifierOutputParseError"),
        ('echo \'{"reward": "NaN"}\' > /logs/verifier/reward.json', None),
        ('echo \'{"reward": {"a": 1}}\' > /logs/verifier/reward.json', None),
        ("touch /logs/verifier/reward.txt", "RewardFileEmptyError"),
    ],
)
async def test_verifier_without_finite_reward_is_verifier_error(folder, test, error):
    record = await run(folder, [SOLVE, DONE, DONE], task={"test": test})
    assert (record.outcome, record.reward) == (Outcome.verifier_error, None)
    assert error is None or (record.error is not None and record.error.type == error)
    assert TrialRecord.model_validate_json(json.dumps(record.to_json(), allow_nan=False)).outcome is record.outcome


async def test_reward_bound_is_configurable(folder):
    task = {"test": "echo 2e6 > /logs/verifier/reward.txt"}
    record = await run(folder, [SOLVE, DONE, DONE], task=task, reward_bound=1e7)
    assert (record.outcome, record.reward) == (Outcome.completed, 2e6)


async def test_hanging_verifier_is_verifier_error(folder):
    record = await run(folder, [SOLVE, DONE, DONE], task={"test": "sleep 30", "verifier_timeout_s": 0.5})
    assert (record.outcome, record.reward) == (Outcome.verifier_error, None)


async def test_hanging_verifier_after_agent_timeout_is_verifier_error(folder):
    task = {"test": "sleep 30", "verifier_timeout_s": 0.5}
    record = await run(folder, [Reply(content=IDLE, delay_s=30)], task=task, agent_timeout_s=1.0)
    assert (record.outcome, record.reward) == (Outcome.verifier_error, None)


async def test_reward_dictionary_is_kept_by_name(folder):
    test = 'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json'
    record = await run(folder, [DONE], task={"test": test})
    assert record.rewards == {"reward": 0.5, "style": 1.0}
    assert record.reward == 0.5


async def test_forged_reward_does_not_count(folder):
    forge = (
        "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; touch /tests/conftest.py; "
        "mkdir -p /app; ln -s /app /logs/verifier/link"
    )
    test = f"ls -A /tests > /logs/verifier/listing; {SOLVED}"
    record = await run(folder, [keys(forge, duration=0.5), DONE, DONE], task={"test": test})
    assert (record.outcome, record.reward) == (Outcome.completed, 0.0)
    assert record.trial_dir is not None
    assert (Path(record.trial_dir) / "verifier" / "listing").read_text().split() == ["test.sh"]
    assert not (Path(record.trial_dir) / "verifier" / "reward.json").exists()


async def test_reward_forged_in_a_step_counts_in_no_step(folder):
    forge = "echo 1 > /logs/verifier/reward.txt; mkdir -p /tests; echo forged > /tests/helper"
    honest = "test ! -e /tests/helper && echo 0.25 > /logs/verifier/reward.txt"
    steps = {"first": honest, "second": honest}
    record = await run(folder, [keys(forge, duration=0.5), DONE, DONE], task={"steps": steps})
    assert [step.rewards for step in record.steps] == [{"reward": 0.25}, {"reward": 0.25}]


async def test_symlink_at_tests_folder_is_removed_not_followed(folder):
    forge = (
        "rm -rf /tests /logs/verifier; mkdir -p /app/keep; touch /app/keep/me; "
        "ln -s /app/keep /tests; ln -s /app/keep /logs/verifier"
    )
    test = "test -f /app/keep/me && test ! -L /tests && echo 1 > /logs/verifier/reward.txt"
    record = await run(folder, [keys(forge, duration=0.5), DONE, DONE], task={"test": test})
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0)


async def test_closed_terminal_is_completed(folder):
    record = await run(folder, [keys("mkdir -p /app; touch /app/answer", "exit", "echo", duration=0.3), IDLE])
    assert (record.outcome, record.reward) == (Outcome.completed, 1.0)


async def test_emptying_tmp_does_not_end_terminal(folder):
    record = await run(folder, [keys("rm -rf /tmp/* /tmp/.[!.]*", duration=0.3), SOLVE, DONE, DONE])
    assert (record.outcome, record.reward, record.turns) == (Outcome.completed, 1.0, 4)


async def test_timeout_in_a_step_is_trial_outcome_with_rewards(folder):
    async def slow_at_first(body: dict[str, Any]) -> str | Reply:
        return Reply(content=IDLE, delay_s=30) if "Step first" in body["messages"][0]["content"] else SOLVE

    steps = {"first": SOLVED, "second": SOLVED}
    record = await run(folder, [slow_at_first, DONE, DONE], task={"steps": steps, "agent_timeout_s": 1.5})
    assert record.outcome is Outcome.agent_timeout
    assert [(step.name, step.outcome, step.rewards) for step in record.steps] == [
        ("first", Outcome.agent_timeout, {"reward": 0.0}),
        ("second", Outcome.completed, {"reward": 1.0}),
    ]
    assert record.reward == 0.5
    assert record.turns == 4


async def test_model_error_in_graded_step_does_not_train(folder):
    steps = {"first": SOLVED, "second": SOLVED}
    record = await run(folder, [Reply(status=500, error="no")], task={"steps": steps})
    assert (record.outcome, record.reward) == (Outcome.model_error, None)
    assert record.error is not None and record.error.type == "ModelServerError"


async def test_cancelled_trial_removes_sandbox_and_folder(folder):
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.TaskGroup() as group:
            trial = group.create_task(run(folder, [Reply(content=IDLE, delay_s=30)], keep_trials="none"))
            await asyncio.sleep(1.0)
            trial.cancel()
            await trial
    assert list((folder / "trials").iterdir()) == []


@pytest.mark.parametrize(("keep", "kept"), [("all", True), ("failed", False), ("none", False)])
async def test_keep_trials_selects_kept_folders(folder, keep, kept):
    record = await run(folder, [DONE], keep_trials=keep)
    assert (record.trial_dir is not None) is kept
    assert len(list((folder / "trials").iterdir())) == int(kept)


async def test_api_key_is_not_on_disk(folder):
    agents: list[dict[str, Any]] = [{}, {"agent": "terminus-2", "agent_kwargs": {"record_terminal_session": False}}]
    for agent in agents:
        trial_folder = folder / str(len(agent))
        record = await run(trial_folder, [keys("env", duration=0.3), DONE, DONE], **agent)
        assert record.outcome is Outcome.completed
        written = [path for path in trial_folder.rglob("*") if path.is_file()]
        assert any(path.name == "trajectory.json" for path in written)
        assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


async def test_events_are_in_order_and_inside_trial(folder):
    events: list[str] = []

    async def record_event(event: str) -> None:
        events.append(event)

    task = make_task(folder / "task")
    async with ScriptedModel([DONE]).serve() as model:
        await run_trial(make_spec(folder, task, model.url), on_event=record_event)
    assert events == ["start", "environment-start", "agent-start", "agent-end", "verification-start", "end"]


async def test_bug_in_callback_is_raised(folder):
    async def broken(event: str) -> None:
        raise ZeroDivisionError(event)

    with pytest.raises(ZeroDivisionError, match="start"):
        await run_trial(make_spec(folder, make_task(folder / "task"), UNREACHABLE_URL), on_event=broken)


async def test_agent_failing_after_stop_is_graded(folder):
    """Harbor's own Terminus-2 raises on every refused request."""
    task = make_task(folder / "task")
    script: list[Scripted] = [SOLVE, Reply(status=400, error="rollout stopped: max_turns")]
    async with ScriptedModel(script).serve() as model:
        spec = make_spec(folder, task, model.url, agent="terminus-2")
        spec.agent_kwargs = {"enable_summarize": False, "record_terminal_session": False}
        record = await run_trial(spec, stop=lambda: "max_turns" if len(model.requests) > 1 else None)
    assert (record.outcome, record.reward) == (Outcome.turn_limit, 1.0)


async def test_sampled_tokens_are_in_record_not_on_disk(folder):
    cut = Reply(content="cut", cut=True)
    record = await run(folder, [SOLVE, cut, DONE, DONE], agent_kwargs={"collect_rollout_details": True})
    assert [bytes(turn.completion_ids).decode() for turn in record.turn_tokens] == [SOLVE, "cut", DONE, DONE]
    assert [turn.cut for turn in record.turn_tokens] == [False, True, False, False]
    assert record.trial_dir is not None
    assert "completion_ids" not in json.dumps(record.to_json())
    assert (Path(record.trial_dir) / "result.json").stat().st_size < 10_000


class LongestBlock:
    """The most CPU seconds that the event loop's thread used without yielding."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            self.cpu_s, last = max(self.cpu_s, time.thread_time() - last), time.thread_time()


async def test_thirty_turns_with_token_ids_do_not_block_event_loop(folder):
    script: list[Scripted] = [*[keys("seq 100", duration=0.0)] * 28, DONE, DONE]
    await run(folder / "warm", script[-2:])
    block = LongestBlock()
    watching = asyncio.create_task(block.watch())
    record = await run(folder, script, agent_kwargs={"collect_rollout_details": True})
    watching.cancel()
    assert (record.turns, len(record.turn_tokens)) == (30, 30)
    assert block.cpu_s < 0.25
    assert record.trial_dir is not None
    trajectory = json.loads((Path(record.trial_dir) / "agent" / "trajectory.json").read_text())
    assert len(trajectory["steps"]) == 31


async def test_sampled_tokens_of_harbor_terminus_are_in_record(folder):
    kwargs = {"collect_rollout_details": True, "record_terminal_session": False}
    task = make_task(folder / "task")
    async with ScriptedModel([SOLVE, DONE]).serve() as model:
        spec = make_spec(folder, task, model.url, agent="terminus-2")
        spec.agent_kwargs |= kwargs
        record = await run_trial(spec)
    assert [bytes(turn.completion_ids).decode() for turn in record.turn_tokens] == [SOLVE, DONE, DONE]
    assert record.trial_dir is not None
    assert (Path(record.trial_dir) / "result.json").stat().st_size < 10_000


async def test_prompts_equal_harbor_terminus_prompts(folder):
    # Two terminals are compared, so each command gets enough time to print its output on a busy machine.
    text_after_json = json.dumps({"commands": [], "task_complete": False}) + " and more"
    script: list[Scripted] = [
        keys("seq 300", duration=1.5),
        "no JSON at all",
        keys("cd /tmp", "pwd", "printf '\\e[31mred\\n'", duration=1.5),
        text_after_json,
        Reply(content='{"analysis": "on and on', cut=True),
        keys("clear", duration=1.5),
        keys("cat /does/not/exist", duration=1.5),
        DONE,
    ]
    task = make_task(folder / "task")
    # Retried because Harbor's agent reads the terminal even if the shell of a busy machine is not ready.
    for _ in range(3):
        ours, harbors = [await _last_request(folder, task, script, agent) for agent in ({}, {"agent": "terminus-2"})]
        if ours == harbors:
            return
    for our_message, harbor_message in zip(ours, harbors, strict=True):
        assert our_message == harbor_message, (our_message[1][-600:], harbor_message[1][-600:])


async def _last_request(
    folder: Path, task: Path, script: list[Scripted], agent: dict[str, Any]
) -> list[tuple[str, str]]:
    """Run a trial and return the role and text of each message in its last request."""
    async with ScriptedModel(script).serve() as model:
        spec = make_spec(folder, task, model.url, **agent)
        assert spec.model is not None
        spec.model.name = "without-limits"  # LiteLLM keeps the limits that another test gave to its model
        spec.agent_kwargs |= {"record_terminal_session": False, "enable_summarize": False}
        record = await run_trial(spec)
    assert (record.outcome, record.turns) == (Outcome.completed, 8)
    return [(message["role"], message["content"]) for message in model.requests[-1]["messages"]]


async def test_reasoning_of_truncated_answer_stays_in_history(folder):
    script: list[Scripted] = [
        Reply(content=SOLVE, reasoning="think"),
        Reply(content="cut", reasoning="long", cut=True),
        DONE,
        DONE,
    ]
    task = make_task(folder / "task")
    async with ScriptedModel(script).serve() as model:
        await run_trial(make_spec(folder, task, model.url))
    answers = [message for message in model.requests[-1]["messages"] if message["role"] == "assistant"]
    assert [answer.get("reasoning_content") for answer in answers] == ["think", "long", None]


async def test_unloadable_task_is_user_error(folder):
    task = make_task(folder / "task")
    (task / "task.toml").write_text("[agent\n")
    with pytest.raises(UserError, match="task"):
        await run_trial(make_spec(folder, task, UNREACHABLE_URL))


async def test_unknown_agent_option_is_user_error(folder):
    task = make_task(folder / "task")
    with pytest.raises(UserError, match="agent nobody:Nothing"):
        await run_trial(make_spec(folder, task, UNREACHABLE_URL, agent="nobody:Nothing"))
