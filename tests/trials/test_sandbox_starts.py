"""Starts at a provider: rate, hold and excuse, over processes."""

import asyncio
import multiprocessing
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from harbortrainer.errors import RunStoppedError
from harbortrainer.trials import sandbox_starts, start_watch
from harbortrainer.trials.provider_faults import is_denied, retry_after_s
from harbortrainer.trials.sandbox_starts import (
    CURRENT,
    DENIED_S,
    GIVE_UP_S,
    STARTS,
    Start,
    StartGate,
    StartState,
    read_state,
    report_start,
)


def admitted(state: StartState, start: float, seconds: float, most: float | None = None) -> int:
    """Count the starts that a state admits to someone who asks ten times a second."""
    return sum(state.wait_s(start + step / 10, most) == 0 for step in range(round(10 * seconds)))


def failing_state(now: float, failures: int = 12) -> StartState:
    state = StartState()
    for number in range(failures):
        state.fail(now + number / 100, "no capacity", None)
    return state


@pytest.mark.parametrize(("most", "own"), [(4.0, None), (None, 4.0), (4.0, 9.0), (9.0, 4.0)])
def test_rate_limits_starts(most: float | None, own: float | None):
    state = StartState(rate=own)
    assert admitted(state, 1000.0, 30.0, most) in range(117, 126)


def test_unlimited_provider_never_waits():
    assert admitted(StartState(), 1000.0, 10.0) == 100


def test_refusal_halves_rate_once_and_holds_for_retry_after():
    state = StartState(rate=8.0)
    assert all(state.fail(1000.0 + number / 100, "429", 5.0) for number in range(50)), "excused"
    assert state.rate == 4.0
    assert state.wait_s(1004.0, None) == pytest.approx(1.49)
    assert state.wait_s(1006.0, None) == 0
    state.succeed(1006.5)
    assert state.rate == pytest.approx(4.05)


def test_hold_admits_one_probe_with_growing_pauses():
    state = failing_state(1000.0)
    waits, now = [], 1000.1
    for _ in range(6):
        waits.append(wait := state.wait_s(now, None))
        now += wait
        assert state.wait_s(now, None) == 0, "the probe"
        assert state.wait_s(now, None) > 0, "one at a time"
        assert state.fail(now, "no capacity", None), "excused"
    assert waits == pytest.approx([2, 4, 8, 16, 30, 30], rel=0.1)


def test_starts_in_flight_do_not_lengthen_the_hold():
    state = failing_state(1000.0, failures=100)
    assert state.wait_s(1001.1, None) < 2


def test_hold_ends_when_most_succeed():
    state, now = failing_state(1000.0), 1010.0
    while state.holds:
        assert state.wait_s(now, None) == 0
        state.succeed(now)
        now += 0.5
    assert now < 1020 and admitted(state, now, 1.0) == 10


def test_single_failures_are_attempts():
    state = StartState()
    results = [state.succeed(1000.0 + n) if n % 8 else state.fail(1000.0 + n, "no image", None) for n in range(50)]
    assert not any(results) and not state.holds


def test_provider_that_never_starts_is_given_up():
    state = failing_state(1000.0)
    for second in range(1, int(GIVE_UP_S)):
        assert state.fail(1000.0 + second, "429", 1.0)
    assert not state.fail(1000.0 + GIVE_UP_S, "429", 1.0)
    assert state.fail(1000.0 + 2 * GIVE_UP_S, "429", 1.0), "a later run begins anew"


@dataclass
class Played:
    """What a simulated provider made of 320 episodes."""

    hours: float
    lost: Counter[bool]
    """Episodes without an attempt left, by whether their task is broken."""
    given_up_s: float | None
    """Seconds from the outage to the end of the run; None if the provider was not given up."""


def play(
    tasks: int,
    broken: int = 0,
    outage: tuple[float, float] = (0, 0),
    p_fail: float = 1.0,
    *,
    in_flight: int = 64,
    denied: bool = False,
) -> Played:
    """Play 320 episodes of a minute with four attempts each. The first tasks never start.

    During the outage, a share of all starts fails or is denied. As in a run, all workers have a sandbox or none has.
    """
    playing: set[tuple[int, int]] = set()
    luck, state, now = random.Random(7), StartState(), 0.0
    waiting = [number % tasks for number in range(320)]
    luck.shuffle(waiting)
    queue = [(task, number) for number, task in enumerate(waiting)]
    events: list[tuple[float, str, tuple[int, int]]] = []
    attempts: Counter[tuple[int, int]] = Counter()
    lost: Counter[bool] = Counter()
    while queue or events:
        now += 0.05
        while queue and len(events) < in_flight and state.wait_s(now, None) <= 0:
            events.append((now + luck.uniform(0.3, 3), "start", queue.pop(0)))
        due = sorted(event for event in events if event[0] <= now)
        events = [event for event in events if event[0] > now]
        for _, kind, episode in due:
            task = str(episode[0])
            if kind == "end":
                playing.remove(episode)
                continue
            if kind == "again":
                queue.insert(0, episode)
            elif episode[0] < broken or (outage[0] <= now < outage[1] and luck.random() < p_fail):
                jitter = luck.uniform(0.75, 1.25)
                if state.fail(now, "fault", None, jitter, task=task, denied=denied, running=bool(playing)):
                    queue.append(episode)
                elif (attempts.update([episode]) or attempts[episode]) < 4:
                    events.append((now + 2 ** attempts[episode], "again", episode))
                else:
                    lost[episode[0] < broken] += 1
            else:
                state.succeed(now, task)
                playing.add(episode)
                events.append((now + luck.uniform(30, 90), "end", episode))
            if state.given_up:
                return Played(now / 3600, lost, now - outage[0])
    return Played(now / 3600, lost, None)


@pytest.mark.parametrize("tasks", [1, 4, 40, 320])
@pytest.mark.parametrize(("outage", "p_fail"), [((0, 120), 0.6), ((60, 660), 0.6), ((0, 600), 1.0), ((60, 660), 1.0)])
def test_no_episode_is_lost_while_most_starts_fail(tasks: int, outage: tuple[float, float], p_fail: float):
    played = play(tasks, outage=outage, p_fail=p_fail)
    assert (played.lost.total(), played.given_up_s) == (0, None)


@pytest.mark.parametrize("in_flight", [16, 64, 200])
@pytest.mark.parametrize("begin", [0, 40])
def test_outage_ends_the_run_after_its_limit(in_flight: int, begin: int):
    """A run whose sandboxes are still running when the outage begins waits for their end first."""
    played = play(40, outage=(begin, 1e9), in_flight=in_flight)
    assert GIVE_UP_S <= (played.given_up_s or 0) < GIVE_UP_S + 150
    assert played.lost.total() == 0
    played = play(40, outage=(begin, begin + GIVE_UP_S - 60), in_flight=in_flight)
    assert (played.lost.total(), played.given_up_s) == (0, None)


@pytest.mark.parametrize("in_flight", [4, 64, 200])
@pytest.mark.parametrize("begin", [0, 40])
def test_denied_starts_end_the_run_in_minutes(in_flight: int, begin: int):
    """With fewer than ten recent starts, the first failures count as attempts."""
    most_lost = 4 if in_flight == 4 else 0
    played = play(40, outage=(begin, 1e9), denied=True, in_flight=in_flight)
    assert DENIED_S <= (played.given_up_s or 0) < DENIED_S + 150 and played.lost.total() <= most_lost
    played = play(40, outage=(begin, begin + DENIED_S - 40), denied=True, in_flight=in_flight)
    assert played.given_up_s is None and played.lost.total() <= most_lost


def test_provider_whose_sandboxes_run_is_not_given_up():
    state = StartState()
    for minute in range(90):
        assert state.fail(60.0 * minute, "429", 1.0, running=True), "excused: it has reached the account's limit"
    assert not state.given_up
    for minute in range(90, 90 + 29):
        assert state.fail(60.0 * minute, "429", 1.0)
    assert not state.fail(60.0 * 119, "429", 1.0) and state.given_up


def test_another_failure_between_denials_begins_their_time_anew():
    state = failing_state(0.0)
    for second in range(0, 600, 30):
        assert state.fail(10.0 + second, "fault", None, denied=second % 60 == 0)
    assert not state.given_up


@pytest.mark.parametrize(("broken", "outage", "hours"), [(4, (0, 0), 0.2), (20, (0, 0), 1.0), (4, (120, 420), 0.3)])
def test_broken_tasks_use_up_attempts_and_hold_no_others(broken: int, outage: tuple[float, float], hours: float):
    played = play(40, broken, outage)
    assert played.lost == {True: 8 * broken} and played.hours < hours


class Refused(Exception):  # noqa: N818 - as clients name it
    """An error with the attributes of a client."""

    def __init__(self, text: str = "", **attributes: object) -> None:
        super().__init__(text)
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Refused(status_code=429, headers={"Retry-After": "7"}), 7.0),
        (Refused(response=SimpleNamespace(status_code=429, headers={"retry-after": "0.5"})), 0.5),
        (Refused(status=429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), 1.0),
        (Refused("Too Many Requests"), 1.0),
        (Refused("rate limit exceeded"), 1.0),
        (Refused(status_code=500), None),
        (ConnectionError("port 4290 refused"), None),
    ],
)
def test_refusals_are_recognized(error: Exception, expected: float | None):
    assert retry_after_s(error) == expected
    wrapped = RuntimeError("cannot start")
    wrapped.__cause__ = error
    assert retry_after_s(wrapped) == expected


@pytest.mark.parametrize(
    ("error", "denied"),
    [
        (Refused(status_code=401), True),
        (Refused(response=SimpleNamespace(status_code=403)), True),
        (Refused(status=402), True),
        (type("AuthError", (Exception,), {})("Token missing. Could not authenticate client."), True),
        (Refused("GRPCError: (<Status.UNAUTHENTICATED: 16>, 'no token')"), True),
        (Refused("Client error '403 Forbidden' for url"), True),
        (Refused("StatusCode.PERMISSION_DENIED"), True),
        (type("BuildAuthError", (Exception,), {})("build denied"), True),
        (Refused("build of the image: not accepted", status_code=403), True),
        (Refused("RUN ./setup.sh: Permission denied"), False),
        (type("BuildException", (Exception,), {})("E: Failed to fetch http://deb.debian.org 403 Forbidden"), False),
        (Refused("Build job b-1 failed. Logs: 403 Client Error: Forbidden for url: https://pypi.org/simple"), False),
        (Refused(status_code=500), False),
        (ConnectionError("port 4010 refused"), False),
        (Refused("no author of this image"), False),
    ],
)
def test_denials_are_recognized(error: Exception, denied: bool):
    assert is_denied(error) is denied
    wrapped = RuntimeError("cannot start")
    wrapped.__cause__ = error
    assert is_denied(wrapped) is denied


class Startable:
    """A sandbox whose starts succeed, or raise an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        report_start(self)  # ty: ignore[invalid-argument-type]

    async def start(self, force_build: bool) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("workers", [1, 2])
async def test_denials_count_only_while_no_sandbox_of_any_worker_runs(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 0.0)
    monkeypatch.setattr(sandbox_starts, "time", clock)
    gate, *others = [StartGate(tmp_path, "modal", None) for _ in range(workers)]
    denied = [gate, *others][-1]
    file = tmp_path / ".starts" / "modal.json"
    CURRENT.set(first := await gate.admit("task"))
    await Startable().start(False)

    async def deny(at: float) -> None:
        clock.time = lambda: at
        for _ in range(12):
            CURRENT.set(Start(denied, task="other"))
            with pytest.raises(Refused):
                await Startable(Refused("no such key", status_code=401)).start(False)

    for at in (1000.0, 1000.0 + DENIED_S):
        await deny(at)
    assert not read_state(file).given_up
    first.end()
    for at in (1200.0, 1200.0 + DENIED_S):
        await deny(at)
    assert read_state(file).given_up


async def test_gates_of_two_processes_share_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 0.0)
    monkeypatch.setattr(sandbox_starts, "time", clock)
    gates = [StartGate(tmp_path, "a:B", 2.0) for _ in range(2)]
    assert await gates[0].failed(Refused(status_code=429, headers={"Retry-After": "60"}), "task")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await gates[1].admit("task")
    (state,) = (tmp_path / ".starts").glob("*.json")
    assert read_state(state).held_until == 1060.0
    clock.time = lambda: 1060.0
    assert (await gates[1].admit("task")).excused is False


def test_torn_state_is_a_new_one(tmp_path: Path):
    (tmp_path / "torn").write_text('{"rate": 1')
    assert read_state(tmp_path / "torn") == read_state(tmp_path / "none") == StartState()


async def test_hold_is_reported_once_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_watch, "_REPORT_S", 0.01)
    lines: list[str] = []
    folders = [tmp_path, tmp_path / "own"]
    for folder in folders:
        (folder / STARTS).mkdir(parents=True)
        (folder / STARTS / "modal.json").touch()
    file = tmp_path / STARTS / "modal.json"
    reporting = asyncio.create_task(start_watch.watch_starts(folders, lines.append))
    await asyncio.sleep(0)
    for state in (StartState(), failing_state(1000.0), StartState()):
        await asyncio.to_thread(file.write_text, state.model_dump_json())
        await asyncio.sleep(0.2)
    reporting.cancel()
    assert lines == [
        "holding new sandboxes of modal: 12 of the last 12 starts failed, the last with no capacity",
        "sandboxes of modal start again",
    ]


GIVEN_UP = [
    (
        StartState(given_up=True, failing_since=0.0, ended=1830.0, fault="ConnectionError: no capacity"),
        "no sandbox of modal started for 30 min, the last failed with ConnectionError: no capacity; "
        "check the provider's status and the account's quota, then continue with --resume",
    ),
    (
        StartState(given_up=True, failing_since=0.0, denied_since=0.0, ended=130.0, fault="AuthError: Token missing"),
        "modal denies every start of a sandbox, the last with AuthError: Token missing; "
        "check the provider's key, its permissions and the account's payment, then continue with --resume",
    ),
]


@pytest.mark.parametrize(("state", "message"), GIVEN_UP, ids=["outage", "denied"])
async def test_watch_ends_the_run_but_not_its_successor(
    state: StartState, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_watch, "_REPORT_S", 0.01)
    (tmp_path / ".starts").mkdir()
    file = tmp_path / ".starts" / "modal.json"
    file.write_text(state.model_dump_json())
    watching = asyncio.create_task(start_watch.watch_starts([tmp_path], print))
    done, _ = await asyncio.wait({watching}, timeout=0.2)
    assert not done, "the state is an earlier run's"
    await asyncio.to_thread(file.write_text, state.model_dump_json())
    with pytest.raises(RunStoppedError) as raised:
        async with asyncio.timeout(10):
            await watching
    assert str(raised.value) == message


def count_starts(folder: Path, number: int) -> None:
    """Count good starts, as one of several processes."""

    async def count() -> None:
        gate = StartGate(folder, "modal", None)
        for _ in range(number):
            await gate.succeeded("task", of_agent=False)

    asyncio.run(count())


@pytest.mark.process
async def test_processes_lose_no_update_of_each_other(tmp_path: Path):
    gate = StartGate(tmp_path, "modal", None)
    await gate.failed(Refused(status_code=429), "task")  # a rate, which each good start raises
    before = read_state(tmp_path / ".starts" / "modal.json").rate
    processes = [
        multiprocessing.get_context("fork").Process(target=count_starts, args=(tmp_path, 300)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        await asyncio.to_thread(process.join)
    after = read_state(tmp_path / ".starts" / "modal.json").rate
    assert before is not None and after == pytest.approx(before + 900 * 0.05)


async def test_states_that_an_active_run_uses_are_not_forgotten(tmp_path: Path):
    state, gate = tmp_path / STARTS / "modal.json", StartGate(tmp_path, "modal", None)
    await gate.failed(Refused(status_code=429), "task")
    start_watch.forget_starts([tmp_path, tmp_path / "missing", state])
    assert read_state(state).rate is not None, "the other run's processes share it"
    del gate
    start_watch.forget_starts([tmp_path])
    assert read_state(state) == StartState()


async def test_updates_open_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = StartGate(tmp_path, "modal", None)
    await gate.admit("task")
    monkeypatch.setattr(Path, "open", None)
    await gate.succeeded("task", of_agent=False)
    await gate.admit("task")
