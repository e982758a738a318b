"""The limit of open files of a process."""

import resource
import subprocess
import sys

import pytest

from harbortrainer.runs.open_files import needed_open_files, trials_within

RAISED = """
import resource, sys
from harbortrainer.runs.open_files import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
print(raise_open_files_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 2000, 2000), (256, HARD, min(HARD, 65_536)), (2000, 2000, 2000)],
    ids=["hard", "most", "already"],
)
def test_soft_limit_is_raised(soft, hard, expected):
    done = subprocess.run(
        [sys.executable, "-c", RAISED, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(expected), str(expected), str(hard)]


def test_needed_files_grow_with_trials():
    assert needed_open_files(512) == 256 + 4 * 512
    assert (trials_within(needed_open_files(512)), trials_within(1)) == (512, 0)
