"""The pages of a Prime-RL run, read from the episodes that its file monitor writes."""

import re
from html import unescape
from pathlib import Path

import pytest
from prime_rl_configs import write_prime_rl_configs
from prime_rl_runs import write_step_run
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from harbortrainer.view.queries import TrialFilter
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import Site


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_step_run(tmp_path / "run", "Qwen/Qwen3-8B")


def page_text(folder: Path, path: str) -> str:
    response = TestClient(Site(open_store(folder)).app(), base_url="http://localhost").get(path)
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.text.split("<main>")[1])).split())


def test_trained_and_untrained_episodes_are_distinguished(folder) -> None:
    rows, total = open_store(folder).find(TrialFilter(sort="task"))
    found = {row.trial: (row.kind, row.step, row.reward, row.trained, row.untrained) for row in rows}
    assert total == 5
    assert found == {
        "a": ("train", 2, 1.0, True, ""),
        "b": ("train", 2, 0.0, True, ""),
        "c": ("train", 1, 1.0, False, "left out by Prime-RL"),
        "d": ("train", 1, None, False, "failed"),
        "e": ("eval", 0, 1.0, False, ""),
    }


def test_step_time_uses_trainer_metrics(folder) -> None:
    text = page_text(folder, "/")
    assert "Prime-RL run model Qwen/Qwen3-8B" in text
    assert "waiting for trials 75.0% 6.0 s" in text and "training 25.0% 2.0 s" in text


@pytest.mark.parametrize("has_own_tokenizer", [False, True])
def test_tokens_are_shown_as_text(folder, tmp_path, monkeypatch, has_own_tokenizer) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    words = {"[UNK]": 0, "sort": 4, "it": 5}
    for name, vocabulary in (("model", words), ("tokenizer", words | {"sort": 5, "it": 4})):
        (tmp_path / name).mkdir()
        Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(tmp_path / name / "tokenizer.json"))
    ids = "These are token ids, because no tokenizer.json of the model was found on this machine."
    assert ids in page_text(folder, "/trial/b"), "the cache is empty"
    tokenizer = str(tmp_path / "tokenizer") if has_own_tokenizer else None
    write_prime_rl_configs(folder, str(tmp_path / "model"), tokenizer=tokenizer)
    text = page_text(folder, "/trial/b")
    assert ids not in text and f"answer 2 tokens {'it sort' if has_own_tokenizer else 'sort it'}" in text, text


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": null}', '{"model": {"name": ["x"]}}'])
def test_run_without_readable_config_is_shown(folder, content) -> None:
    for file in folder.glob("configs/*.json"):
        file.unlink() if content is None else file.write_text(content)
    assert "Prime-RL run model unknown" in page_text(folder, "/")
    assert "prompt 7 characters sort it" in page_text(folder, "/trial/b")


def test_trial_page_shows_turns(folder) -> None:
    text = page_text(folder, "/trial/b")
    assert "(advantage -0.5; reward 0, group mean 0.667)" in text
    assert "sampled by version 3" in text and "Instruction sort it" in text and "prompt 3 tokens sampled 2" in text
    assert "SandboxError: gone" in page_text(folder, "/trial/d")
