"""Parsing of task sources."""

import pytest

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"

SPELLINGS = {
    "datasets/mine": TaskSource("folder", "datasets/mine"),
    "terminal-bench": TaskSource("folder", "terminal-bench"),
    "terminal-bench@2.0": TaskSource("registry", "terminal-bench", "2.0"),
    "org/set@sha256:ab": TaskSource("registry", "org/set", "sha256:ab"),
    "own/registry.json#set@1.0": TaskSource("registry", "set", "1.0", registry="own/registry.json"),
    "https://h.org/registry.json#set@1": TaskSource("registry", "set", "1", registry="https://h.org/registry.json"),
    f"https://h.org/o/r@{COMMIT}#tasks/easy": TaskSource("git", "https://h.org/o/r", COMMIT, "tasks/easy"),
    "https://h.org/o/r.git": TaskSource("git", "https://h.org/o/r.git"),
    "ssh://git@h.org/o/r.git@v1": TaskSource("git", "ssh://git@h.org/o/r.git", "v1"),
    "git@h.org:o/r.git@dev#.": TaskSource("git", "git@h.org:o/r.git", "dev", "."),
    f"file:///srv/r.git@{COMMIT}": TaskSource("git", "file:///srv/r.git", COMMIT),
    "hf:org/set": TaskSource("hub", "org/set"),
    f"hf:org/set@{COMMIT}#data/train-*.parquet": TaskSource("hub", "org/set", COMMIT, "data/train-*.parquet"),
    "sets/mine.parquet": TaskSource("parquet", "sets/mine.parquet"),
    "sets/*.parquet@" + "0" * 64: TaskSource("parquet", "sets/*.parquet", "0" * 64),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_parsing_and_formatting_are_inverse(text: str) -> None:
    assert task_source(text) == SPELLINGS[text]
    assert str(task_source(text)) == text


def test_browser_url_of_a_repository_is_a_source() -> None:
    assert str(task_source("https://github.com/o/r/tree/main/tasks/easy")) == "https://github.com/o/r@main#tasks/easy"
    assert str(task_source("git+https://h.org/o/r@main")) == "https://h.org/o/r@main"
    assert str(task_source("hf://datasets/o/n")) == "hf:o/n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty task source"),
        ("hf:set", "not a hub dataset"),
        ("hf:org/set@--x", "not a hub dataset"),
        ("own/registry.json#set", "not a dataset of a registry file"),
        ("git+nowhere", "not a git URL"),
        ("git+--upload-pack=x", "not a git URL"),
        ("https://h.org/o/r@--upload-pack=x", "is not a commit"),
        ("https://h.org/o/r#../../etc", "is not a folder in the repository"),
        ("https://me:secret@h.org/o/r", "the URL contains a password"),
        ("https://token@h.org/o/r", "the URL contains a password"),
    ],
)
def test_invalid_source_gives_one_line_without_secrets(text: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        task_source(text)
    assert what in str(caught.value)
    assert "secret" not in str(caught.value) and "token" not in str(caught.value)
    assert caught.value.do and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["https://h.org/o/r@main", "https://h.org/o/r", "hf:o/n", "set@head", "o/set@latest"])
def test_run_refuses_an_unpinned_source(text: str) -> None:
    with pytest.raises(ValueError, match="may mean other tasks tomorrow; `harbortrainer tasks fetch"):
        TasksetKeys(dataset=text)


def test_run_refuses_an_unpinned_source_with_a_command_that_works_as_printed() -> None:
    with pytest.raises(ValueError, match=r"`harbortrainer tasks fetch 'https://h\.org/o/r@main#my tasks'`"):
        TasksetKeys(dataset="https://h.org/o/r@main#my tasks")


def test_run_refuses_two_task_sources() -> None:
    with pytest.raises(ValueError, match="tasks_dir and dataset are both set"):
        TasksetKeys(dataset="set@1.0", tasks_dir="here")
    dumped = TasksetKeys(dataset="set@1.0").model_dump()
    assert TasksetKeys.model_validate(dumped).source == TaskSource("registry", "set", "1.0")
    assert TasksetKeys(tasks_dir="here").source == TaskSource("folder", "here")
