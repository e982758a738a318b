"""`[trainer.loss]`, `loss_aggregation` and `length_weighted_baseline` in run files, on both engines."""

from pathlib import Path

import pytest

from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import load, read
from harbortrainer.config.trainer_table import LOSSES, DefaultLoss, IpoLoss, PpoLoss
from harbortrainer.errors import UserError

SOURCE = '[[orchestrator.train.source]]\nenv = { taskset = { id = "harbor_env" } }\n'
PINNED = "[orchestrator]\ngroup_size = 1\n"
UNNAMED = "no loss is named: trainer.loss.type is 'default'"


@pytest.fixture
def write(tmp_path):
    def write(text: str, source: str = SOURCE) -> Path:
        path = tmp_path / "run.toml"
        path.write_text('[run]\nname = "r"\n[trainer.model.lora]\n' + text + source)
        return path

    return write


def loss(text: str) -> str:
    return f"[trainer.loss]\n{text}\n"


def algo(text: str) -> str:
    return f"[orchestrator.algo]\n{text}\n"


def error_of(file: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(file, overrides)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", LOSSES)
def test_named_loss_has_its_defaults(write, name):
    config = load(write(loss(f"type = '{name}'")))
    assert config.trainer.loss == LOSSES[name]()
    assert not any(UNNAMED in note for note in config.notes)


@pytest.mark.parametrize("text", ["", loss("kl_tau = 0.0")])
def test_file_without_loss_gets_the_pinned_default_and_one_note(write, text):
    config = load(write(text))
    assert isinstance(config.trainer.loss, DefaultLoss)
    assert config.trainer.loss.kl_tau == (0.0 if text else 1e-3)
    assert len([note for note in config.notes if UNNAMED in note]) == 1


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("", True),
        ("\neps = 0.2", True),
        ("\neps = 0.2\nkl_tau = 0.1", False),
        ("\nipo_threshold = 0.2\nkl_tau = 0", False),
    ],
)
def test_ipo_notes_defaults_that_differ_between_releases(write, text, noted):
    config = load(write(loss(f"type = 'ipo'{text}") + PINNED))
    assert any("Prime-RL at the pinned commit takes 0.1 and 0.001" in note for note in config.notes) == noted


def test_ipo_threshold_is_the_older_name_of_eps(write):
    assert load(write(loss("type = 'ipo'\nipo_threshold = 0.1"))).trainer.loss == IpoLoss(eps=0.1)


def test_resolved_run_names_the_loss(write, tmp_path):
    config = load(write(loss("type = 'ppo'\nratio_high = 1.5") + algo("loss_aggregation = 'prompt'")))
    again = tmp_path / "resolved.toml"
    again.write_text(config.resolved())
    assert load(again).trainer.loss == PpoLoss(ratio_high=1.5)
    assert load(again).orchestrator.algo.loss_aggregation == "prompt"
    unnamed = load(write(""))
    again.write_text(unnamed.resolved())
    assert load(again).trainer.loss == unnamed.trainer.loss
    assert not any(UNNAMED in note for note in load(again).notes)


def test_overrides_select_the_loss(write):
    words = ["--trainer.loss.type", "ppo", "--trainer.loss.ratio-high", "1.5", "--orchestrator.algo.loss-aggregation"]
    config = load(write(""), [*words, "prompt", "--orchestrator.algo.length-weighted-baseline"])
    assert config.trainer.loss == PpoLoss(ratio_high=1.5)
    assert config.orchestrator.algo.loss_aggregation == "prompt"
    assert config.orchestrator.algo.length_weighted_baseline


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (loss("type = 'ice_pop'"), "trainer.loss.type", "unknown loss 'ice_pop'; did you mean 'icepop'?"),
        (loss("type = 'x'"), "trainer.loss.type", "choose one of default, ipo, icepop, ppo, cispo"),
        (loss("ratio_hi = 2"), "trainer.loss.ratio_hi", "did you mean trainer.loss.ratio_high?"),
        (loss("type = 'ipo'\nratio_low = 0.5"), "trainer.loss.ratio_low", "the loss ipo has no such key"),
        (
            loss("type = 'ppo'\ndppo_mask_low = 0.5"),
            "trainer.loss.dppo_mask_low",
            "it has adv_tau, max_importance_ratio",
        ),
        (loss("ipo_threshold = 0.5"), "trainer.loss.eps", "the loss default has no such key"),
        (loss("type = 'icepop'\nratio_low = 9.0"), "trainer.loss", "ratio_low (9) is above ratio_high (5)"),
        (loss("type = 'ppo'\nratio_high = 1e5"), "trainer.loss", "max_importance_ratio (10000) is below ratio_high"),
        (loss("type = 'cispo'\nratio_low = 1.5"), "trainer.loss.ratio_low", "less than or equal to 1"),
        (loss("type = 'ipo'\neps = -0.1"), "trainer.loss.eps", "greater than or equal to 0"),
        (
            loss("type = 'ipo'\neps = 0.1\nipo_threshold = 0.2"),
            "ipo_threshold",
            "contradicts trainer.loss.eps = 0.1",
        ),
        (algo("loss_agregation = 'token'"), "loss_agregation", "did you mean orchestrator.algo.loss_aggregation?"),
        (algo("loss_aggregation = 'batch'"), "orchestrator.algo.loss_aggregation", "'token', 'sequence', 'prompt'"),
        (algo("type = 'max_rl'\nloss_aggregation = 'prompt'"), "orchestrator.algo", "only loss_aggregation = 'token'"),
        (
            algo("type = 'max_rl'\nlength_weighted_baseline = true"),
            "orchestrator.algo",
            "max_rl has no length_w",
        ),
    ],
)
def test_error_names_key_and_nearest_one(write, text, key, message):
    error = error_of(write(text))
    assert error.where.endswith(key)
    assert message in f"{error.what}; {error.do}"


def test_error_of_override_names_the_command_line(write):
    error = error_of(write(""), "--trainer.loss.type", "ice_pop")
    assert (error.where, error.do) == ("command line: --trainer.loss.type", "did you mean 'icepop'?")


def test_sources_with_different_aggregation_are_refused(write):
    own = SOURCE + "name = 'b'\nalgo = { loss_aggregation = 'prompt' }\n"
    assert "sources have different loss_aggregation (prompt, token)" in error_of(write("", SOURCE + own)).what
    assert load(write(algo("loss_aggregation = 'prompt'"), SOURCE + own)).orchestrator.algo.loss_aggregation == "prompt"


@pytest.mark.parametrize(
    ("text", "key", "do"),
    [
        (loss("type = 'ipo'\neps = 0.1") + PINNED, "trainer.loss.eps", "set trainer.loss.ipo_threshold instead"),
        (loss("type = 'ppo'\nratio_high = 1.5"), "trainer.loss.ratio_high", "remove it"),
        (algo("loss_aggregation = 'prompt'"), "orchestrator.algo.loss_aggregation", "remove it"),
        (algo("length_weighted_baseline = true"), "orchestrator.algo.length_weighted_baseline", "remove it"),
    ],
)
def test_prime_rl_engine_refuses_keys_that_the_pinned_commit_lacks(write, text, key, do):
    with pytest.raises(UserError) as caught:
        prime_run(read(write(text)))
    assert caught.value.where.endswith(f": {key}")
    assert caught.value.what == "Prime-RL has no such key at the pinned commit"
    assert caught.value.do == f"{do}, or run with --engine local"


def test_prime_rl_engine_takes_the_losses_of_the_pinned_commit(write):
    prime_run(read(write(loss("type = 'ipo'\nipo_threshold = 0.1\nkl_tau = 0.0"))))
