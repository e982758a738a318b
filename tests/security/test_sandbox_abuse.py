"""A policy that abuses its local sandbox is graded, or gets 0; its trial is never void. Real trials.

The verifier gives 0.25 if /app/answer is missing, to distinguish a real grade from a `self_inflicted` 0.
"""

from pathlib import Path

import pytest
from attempts import LEAVES_LOOPS, LOOPS, Played, play
from fakes import DONE, keys

from harbortrainer.environment.rollout_state import Attempts, trace_error
from harbortrainer.trials import Outcome

pytestmark = pytest.mark.e2e

GRADES = (
    "seq 3000 > /tests/room && cat /tests/room | sort | tail -n1 > /dev/null && echo 0.25 > /logs/verifier/reward.txt"
)
LIMITS = {"disk_mb": 64, "memory_mb": 256, "pids": 100}
PYTHON = "python3 -c '{}' &"
HOLDS = PYTHON.format('x = bytearray({} << 20); __import__("time").sleep(500)')
GRADED = {
    "a full disk": "dd if=/dev/zero of=/big bs=1M",
    "a full disk that stays full": "while :; do dd if=/dev/zero of=/big$RANDOM bs=1M; done 2>/dev/null &",
    "a disk full of files": "mkdir /many; cd /many; for i in {1..9}; do seq ${i}00000 ${i}99999 | xargs touch; done",
    "a full disk under the logs": "cat /dev/zero > /logs/verifier/big",
    "a fork bomb": "bomb() { bomb | bomb & }; bomb",
    "processes without end": "for i in {1..300}; do sleep 500 & done",
    "a memory hog": HOLDS.format(280),
    "one that never has enough": f"(while :; do {HOLDS.format(900)} wait; done) 2>/dev/null &",
    "many small ones": f"for i in {{1..40}}; do {HOLDS.format(12)} done",
    "memory that is shared": PYTHON.format(
        'm = __import__("mmap").mmap(-1, 250 << 20); m.write(b"x" * (250 << 20)); __import__("time").sleep(500)'
    ),
    "filled socket buffers": PYTHON.format(
        's = __import__("socket"); held = []\nfor _ in range(3000):\n a, b = s.socketpair(); a.setblocking(False); '
        'held.append((a, b))\n try:\n  while 1: a.send(b"x" * 65536)\n except OSError: pass\n'
        '__import__("time").sleep(500)'
    ),
    "its terminal killed": "pkill -9 tmux; kill -9 $PPID",
    "everything killed": "kill -9 -1",
    "the first process killed": "kill -9 1; kill 1; kill -INT 1; kill -SEGV 1",
    "tmux removed": "rm -f $(command -v tmux)",
    "the verifier's folder filled again and again": "(while :; do touch /logs/verifier/$RANDOM; done) &",
    "a link where the tests go": "rm -rf /tests; ln -s /app /tests",
    **LOOPS,
    "a file where the tests go": "(while :; do rm -rf /tests; touch /tests; done) 2>/dev/null &",
}
BROKEN = {
    "the shell removed": ("rm -f /bin/bash /usr/bin/bash", "removed"),
    "the shell replaced": (
        "printf '#!/bin/sh\\nexit 0\\n' > /tmp/b; chmod +x /tmp/b; mv /tmp/b /usr/bin/bash",
        "replaced",
    ),
    "everything removed": ("rm -rf --no-preserve-root / 2>/dev/null", "removed"),
    "everything removed but links to themselves": (LEAVES_LOOPS, "removed"),
    "the libraries removed": (
        "rm -rf /lib/x86_64-linux-gnu/libc.so.6 /usr/lib/x86_64-linux-gnu/libc.so.6",
        "the shell",
    ),
}


async def attempt(folder: Path, command: str, *, waits: float = 0.1, **more: object) -> Played:
    """Run a trial with one command; `waits` is the time in seconds between the command and the end."""
    task = {"extra": '[environment]\nnetwork_mode = "no-network"\nstorage_mb = 64\nmemory_mb = 256\n'}
    script = [keys(command, duration=1.5), keys("true", duration=waits), DONE, DONE]
    return await play(folder, script, test=GRADES, task=task, environment_kwargs=LIMITS, **more)


def is_not_retried(trial: Played) -> bool:
    return trace_error(trial.record, Attempts()) is None


@pytest.mark.parametrize("case", GRADED)
async def test_sandbox_abuse_is_still_graded(tmp_path: Path, case: str):
    trial = await attempt(tmp_path, GRADED[case])
    assert (trial.record.outcome, trial.record.reward) == (Outcome.completed, 0.25), trial.record
    assert is_not_retried(trial)


async def test_agent_that_kills_everything_and_waits_is_graded(tmp_path: Path):
    trial = await attempt(tmp_path, "(sleep 0.5; kill -9 -1) & disown", waits=3.0)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.completed, 0.25), trial.record


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_sandbox_is_self_inflicted(tmp_path: Path, case: str):
    command, sign = BROKEN[case]
    trial = await attempt(tmp_path, command)
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert is_not_retried(trial)
    assert sign in trial.record.evidence
    assert "a fresh sandbox starts and answers" in trial.record.evidence
    assert "MB of memory left" in trial.record.evidence
