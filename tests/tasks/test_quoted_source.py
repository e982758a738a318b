"""Commands in messages work as printed."""

from pathlib import Path

import pytest

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_selection import checked_tasks


def test_advice_quotes_source_with_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        checked_tasks([], TasksetKeys(tasks_dir=Path("my tasks"), checked_only=True))
    assert "`harbortrainer tasks check 'my tasks'`" in str(caught.value)
