"""A warm-up on a run's good trials learns what was sampled there, each token once, and nothing else."""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from played_run import played_run
from tiny_model import build_tiny_model

from harbortrainer.cli import main
from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import good_trials
from harbortrainer.runs.ingredients import Ingredients, weights_of
from harbortrainer.warmup.good_examples import encoded_trials, model_for, sequences_of
from harbortrainer.warmup.starting_policy import load_policy
from harbortrainer.warmup.supervised import SupervisedTrainer
from harbortrainer.warmup.warmup import warm_up


def test_the_sampled_tokens_are_learned_once_with_their_own_ids(tmp_path: Path) -> None:
    run = played_run(tmp_path / "run", tmp_path / "model")
    left_out: Counter[str] = Counter()
    learned = {
        trial.line.trial: [
            bytes(token for token, own in zip(row.ids, row.answer, strict=True) if own)
            for row in sequences_of(trial, left_out)
        ]
        for trial in good_trials(run, min_reward=1.0, left_out=left_out)
    }
    assert learned == {
        "solved": [b"lsdone"],
        "the-same": [b"lsdone"],
        "two-steps": [b"one", b"two"],
        "rewritten": [b"y", b"z"],
        "cut-off": [b"went"],
    }
    first = encoded_trials(run, min_reward=1.0, left_out=Counter())[0]
    assert bytes(first.ids) == b"\x09do it\x08ls\x09a b\x08done", "the whole conversation is shown"


def test_a_warm_up_on_a_run_makes_its_good_trials_likelier(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    run = played_run(tmp_path / "run", model)
    rows = encoded_trials(run, min_reward=1.0, left_out=Counter())
    before = SupervisedTrainer(load_policy(str(model)), lr=1e-3).likelihood(rows)
    warm_up(WarmupConfig(run=run, steps=30, batch_size=8, lr=3e-3), tmp_path / "policy", seed=1)
    after = SupervisedTrainer(load_policy(str(tmp_path / "policy")), lr=1e-3).likelihood(rows)
    assert all(later > 10 * earlier for earlier, later in zip(before, after, strict=True))
    assert "warm-up: left out: 1 under 1" in capfd.readouterr().out


def test_a_run_that_teaches_nothing_is_told_before_torch_is_imported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["warmup", "--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no trials of a run here" in capfd.readouterr().err
    with pytest.raises(ValueError, match="give either family or tasks, or a run"):
        WarmupConfig(run=tmp_path, tasks=tmp_path)


def test_a_model_with_another_tokenizer_cannot_learn_the_tokens(tmp_path: Path) -> None:
    model, other = build_tiny_model(tmp_path / "model"), build_tiny_model(tmp_path / "other", vocab=300)
    run = played_run(tmp_path / "run", model)
    alike = build_tiny_model(tmp_path / "alike", seed=2)
    assert model_for(run, None) == str(model) and model_for(run, str(alike)) == str(alike)
    with pytest.raises(UserError, match="has another tokenizer"):
        model_for(run, str(other))
    (run / "made_of.json").write_text(Ingredients(weights=weights_of(str(model))).model_dump_json())
    model.rename(tmp_path / "away")
    with pytest.raises(UserError, match="the model that the run started from is not there any more"):
        model_for(run, None)
    assert model_for(run, str(alike)) == str(alike)
