"""A warm-up on a run's good trials learns exactly the sampled tokens, each once."""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from finished_run import write_finished_run
from prime_rl_configs import write_prime_rl_configs
from tiny_model import build_tiny_model

from harbortrainer.cli import main
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import good_trials
from harbortrainer.runs.provenance import Provenance, model_fingerprints
from harbortrainer.warmup.supervised import SupervisedTrainer, load_policy
from harbortrainer.warmup.trial_sequences import encoded_trials, model_for, sequences_of
from harbortrainer.warmup.warmup import warm_up


def test_sampled_tokens_are_learned_once(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path / "run", tmp_path / "model")
    left_out: Counter[str] = Counter()
    learned = {
        trial.row.trial: [
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
        "cut-early": [b"fine"],
    }
    first = encoded_trials(run, min_reward=1.0, left_out=Counter())[0]
    assert bytes(first.ids) == b"\x09do it\x08ls\x09a b\x08done", "the whole conversation is shown"


def test_warm_up_on_run_increases_likelihood_of_good_trials(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    run = write_finished_run(tmp_path / "run", model)
    rows = encoded_trials(run, min_reward=1.0, left_out=Counter())
    before = SupervisedTrainer(load_policy(str(model)), lr=1e-3).likelihood(rows)
    warm_up(WarmupConfig(run=run, steps=30, batch_size=8, lr=3e-3), tmp_path / "policy", seed=1)
    after = SupervisedTrainer(load_policy(str(tmp_path / "policy")), lr=1e-3).likelihood(rows)
    assert all(later > 10 * earlier for earlier, later in zip(before, after, strict=True))
    assert "warm-up: skipped trials: 1 with a reward under 1" in capfd.readouterr().out


def test_run_without_good_trials_is_refused_before_torch_import(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["warmup", "--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "this run has no trials" in capfd.readouterr().err
    with pytest.raises(ValueError, match="takes only one of family, tasks and run"):
        WarmupConfig(run=tmp_path, tasks=tmp_path)


def test_warm_up_on_prime_rl_run_starts_from_its_base_model(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    write_prime_rl_configs(tmp_path / "prime", str(model))
    assert model_for(tmp_path / "prime", None) == str(model)


def test_refuses_model_with_other_tokenizer(tmp_path: Path) -> None:
    model, other = build_tiny_model(tmp_path / "model"), build_tiny_model(tmp_path / "other", vocab=300)
    run = write_finished_run(tmp_path / "run", model)
    alike = build_tiny_model(tmp_path / "alike", seed=2)
    assert model_for(run, None) == str(model) and model_for(run, str(alike)) == str(alike)
    with pytest.raises(UserError, match="has another tokenizer"):
        model_for(run, str(other))
    (run / "made_of.json").write_text(Provenance(weights=model_fingerprints(str(model))).model_dump_json())
    model.rename(tmp_path / "away")
    with pytest.raises(UserError, match="the model that the run started from no longer exists"):
        model_for(run, None)
    assert model_for(run, str(alike)) == str(alike)
