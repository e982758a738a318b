"""Harbor's private API is as harbor_compat expects; otherwise one sentence names the release that lacks it."""

from importlib.metadata import version

import pytest
from harbor.models.task.task import Task
from harbor.models.trial.config import TrialConfig
from pydantic import ValidationError

from harbortrainer.harbor_compat import DOWNLOADS, TERMINUS, TRIALS, raised_by_agent, raised_reading_task
from harbortrainer.harbor_compat.job_folder import JOBS
from harbortrainer.private_apis import PrivateApi, fault_at

PLACES = [(api, place) for api in (TERMINUS, TRIALS, DOWNLOADS, JOBS) for place in api.places]


@pytest.mark.parametrize(("api", "place"), PLACES, ids=[place for _, place in PLACES])
def test_installed_harbor_has_expected_private_api(api: PrivateApi, place: str):
    fault = fault_at(place)
    message = f"{fault}: harbor {version('harbor')} is installed, {api.used_by} was written for harbor"
    assert not fault, f"{message} {api.written_for}"


def test_finds_agent_frame_only_in_its_traceback():
    assert raised_by_agent('  File "trial.py", line 1, in _run_agent_phase\n')
    assert not raised_by_agent('  File "trial.py", line 1, in _verify_step\n')


def test_finds_task_loading_frame():
    with pytest.raises(TypeError) as of_task:
        Task(None)  # ty: ignore[invalid-argument-type]
    assert raised_reading_task(of_task.value)
    with pytest.raises(ValidationError) as of_trial:
        TrialConfig.model_validate({})
    assert not raised_reading_task(of_trial.value)
