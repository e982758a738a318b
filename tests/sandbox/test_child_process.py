"""Output of a child program that was killed or failed."""

import sys

import pytest

from harbortrainer.sandbox.images.child_process import run_child

pytestmark = pytest.mark.process

SELF_KILLING_PROGRAM = "import os, signal; print('STEP 1/2: FROM a', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


async def test_killed_program_is_reported():
    output = await run_child([sys.executable, "-c", SELF_KILLING_PROGRAM], isolated=False)
    assert output.tail.startswith("STEP 1/2: FROM a\n") and output.tail.endswith(
        "was killed, by a user or because memory ran out"
    )


async def test_failed_program_is_not_reported_as_killed():
    assert (await run_child([sys.executable, "-c", "print('reason'); exit(1)"], isolated=False)).tail == "reason"


async def test_program_past_its_timeout_is_reported_with_its_output():
    program = "import time; print('STEP 2/2: RUN make', flush=True); time.sleep(600)"
    output = await run_child([sys.executable, "-c", program], isolated=False, seconds=1)
    assert (output.code, output.tail) == (-1, f"STEP 2/2: RUN make\n\n{sys.executable} did not end within 1 s")
