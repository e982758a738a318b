"""The configs that Prime-RL's real `rl` writes for a run on one machine, as `export`, `warmup` and `view` read them."""

from pathlib import Path

import pytest
from conftest import MAX_LENGTH, PrimeRL
from fakes import make_task
from test_orchestrator import free_port
from test_stalled_run import ENV, RUN_FILE

from harbortrainer.runs.provenance import engine_of, named_model, run_config
from harbortrainer.view.run_folders import prime_rl_names

pytestmark = pytest.mark.prime_rl


def test_configs_name_model_tokenizer_and_adapter(prime_rl: PrimeRL, tmp_path: Path, policy: Path) -> None:
    make_task(tmp_path / "tasks" / "one")
    env = ENV.format(folder=tmp_path)
    values = {"folder": tmp_path, "length": MAX_LENGTH, "policy": policy, "port": free_port(), "env": env}
    file, log = tmp_path / "run.toml", tmp_path / "rl.log"
    file.write_text("dry_run = true\n" + RUN_FILE.format(**values, url="http://127.0.0.1:9"))
    assert prime_rl.start("rl", file, log).wait(300) == 0, log.read_text()[-3000:]
    run = tmp_path / "outputs/r"
    assert (engine_of(run), named_model(run)) == ("prime-rl", str(policy))
    assert prime_rl_names(run) == (str(policy), str(policy))
    config = run_config(run)
    assert config.keys() == {"trainer", "orchestrator"} and config["trainer"]["model"]["lora"]["rank"] == 4
