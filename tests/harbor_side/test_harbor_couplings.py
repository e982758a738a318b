"""Harbor's private side is as the harbor_side package counts on it; else the sentence says which release has it not."""

from importlib.metadata import version

import pytest

from harbortrainer.couplings import Couplings, fault_at
from harbortrainer.harbor_side import DOWNLOADS, TERMINUS, TRIALS, raised_by_the_agent, raised_by_the_task
from harbortrainer.harbor_side.job_folder import JOBS

PLACES = [(couplings, place) for couplings in (TERMINUS, TRIALS, DOWNLOADS, JOBS) for place in couplings.places]


@pytest.mark.parametrize(("couplings", "place"), PLACES, ids=[place for _, place in PLACES])
def test_the_installed_harbor_has_it_as_we_use_it(couplings: Couplings, place: str):
    fault = fault_at(place)
    told = f"{fault}: harbor {version('harbor')} is installed, {couplings.used_by} was written for harbor"
    assert not fault, f"{told} {couplings.written_for}"


def test_the_agents_frame_is_found_in_its_trace_only():
    assert raised_by_the_agent('  File "trial.py", line 1, in _run_agent_phase\n')
    assert not raised_by_the_agent('  File "trial.py", line 1, in _verify_step\n')


def test_a_task_that_cannot_be_read_is_told_by_its_frame():
    assert raised_by_the_task(["create", "_load_task"])
    assert not raised_by_the_task(["create"])
