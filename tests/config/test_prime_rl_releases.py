"""Run files with the keys of newer Prime-RL releases: read by both engines, and written by `config upgrade`."""

import tomllib
from pathlib import Path

import pytest

from harbortrainer.commands.opening import assumed_note
from harbortrainer.config.algorithm_config import GateConfig
from harbortrainer.config.prime_rl_key_names import newer_key, pinned_key, release_of
from harbortrainer.config.prime_rl_releases import to_newer, to_pinned
from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import load, read, upgrade_file
from harbortrainer.config.trainer_table import IpoLoss
from harbortrainer.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
NEWER = """
max_steps = 20
seq_len = 4096

[run]
name = "newer"

[model]
name = "Qwen/Qwen3-0.6B"

[trainer.model.lora]
rank = 8

[orchestrator]
batch_size = 16

[orchestrator.train]
group_size = 8
env.timeout.episode = 600

[orchestrator.train.algo]
type = "max_rl"

[[orchestrator.train.source]]
name = "first"
env.taskset.id = "harbor_env"
env.taskset.tasks_dir = "tasks"
env.agent.harness.id = "harbor_env"
env.agent.harness.environment_type = "local"

[orchestrator.eval]
interval = 5
group_size = 2
select.limit = 10

[[orchestrator.eval.source]]
name = "held-out"
env.taskset.id = "harbor_env"
env.taskset.tasks_dir = "held-out"
env.agent.harness.id = "harbor_env"
env.agent.harness.environment_type = "local"
"""


def tables(*changes: tuple[str, str]) -> dict:
    """Return the tables of the newer file; each change replaces a text in it."""
    text = NEWER
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return tomllib.loads(text)


@pytest.fixture
def newer_file(tmp_path):
    def write(*changes: tuple[str, str]) -> Path:
        text = NEWER
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "newer.toml").write_text(text)
        return tmp_path / "newer.toml"

    return write


def test_embedded_engine_reads_newer_file(newer_file):
    orchestrator = load(newer_file()).orchestrator
    assert orchestrator.eval is not None
    assert (orchestrator.group_size, orchestrator.algo.type) == (8, "max_rl")
    assert orchestrator.train.source[0].env["timeout"] == {"episode": 600}
    assert (orchestrator.eval.source[0].num_examples, orchestrator.eval.group_size) == (10, 2)


def test_newer_file_keeps_defaults_of_newer_release(newer_file):
    run = load(newer_file())
    curriculum = run.orchestrator.train.source[0].curriculum
    assert run.trainer.loss == IpoLoss(eps=0.3, kl_tau=0)
    assert run.trainer.optim.weight_decay == 0
    assert curriculum is not None
    assert list(curriculum.gates.values()) == [GateConfig(type="advantage_range", reject_min=0, reject_max=0)]


@pytest.mark.parametrize(
    "change",
    [
        ("batch_size = 16", "batch_size = 16\nconstant_trainer_batch_size = false"),
        ('type = "max_rl"', 'type = "echo"'),
    ],
)
def test_no_gate_where_newer_release_replaces_no_group(newer_file, change):
    assert load(newer_file(change)).orchestrator.train.source[0].curriculum is None


def test_source_inherits_group_key_by_key():
    shared = ("env.timeout.episode = 600", "env.timeout = { episode = 600, setup = 60 }\nselect.limit = 3")
    own = ('tasks_dir = "held-out"', 'tasks_dir = "held-out"\nselect.shuffle = false')
    train = (
        'tasks_dir = "tasks"',
        'tasks_dir = "tasks"\nenv.timeout.episode = 900\nalgo.length_weighted_baseline = true',
    )
    data, errors = to_pinned(tables(shared, own, train), "f.toml")
    source = data["orchestrator"]["train"]["source"][0]
    assert source["env"]["timeout"] == {"episode": 900, "setup": 60}
    assert source["algo"] == {"type": "max_rl", "length_weighted_baseline": True}
    assert data["orchestrator"]["eval"]["source"][0]["num_examples"] == 10
    assert [error.where for error in errors] == ["f.toml: orchestrator.train.source[0].select.limit"]


def test_source_with_another_algorithm_inherits_nothing_of_it():
    shared = ('type = "max_rl"', 'type = "grpo"\nlength_weighted_baseline = true')
    own = ('tasks_dir = "tasks"', 'tasks_dir = "tasks"\nalgo.type = "max_rl"')
    data, _ = to_pinned(tables(shared, own), "f.toml")
    assert data["orchestrator"]["train"]["source"][0]["algo"] == {"type": "max_rl"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("group_size = 8", "group_size = 8\nsampling.top_p = 0.9"), "orchestrator.train.sampling.top_p"),
        (("group_size = 8", "group_size = 8\nsampling.top_k = 50"), "orchestrator.train.sampling.top_k"),
        (
            ("batch_size = 16", 'batch_size = 16\nconstant_trainer_batch_size = "no"'),
            "orchestrator.constant_trainer_batch_size",
        ),
        (("rank = 8", "rank = 8\n[trainer.loss]\nscore_centering = true"), "trainer.loss.score_centering"),
        (
            ('tasks_dir = "tasks"', 'tasks_dir = "tasks"\nmin_abs_advantage = 0.1'),
            "orchestrator.train.source[0].min_abs_advantage",
        ),
        (
            ('tasks_dir = "held-out"', 'tasks_dir = "held-out"\nselect.skip = 3'),
            "orchestrator.eval.source[0].select.skip",
        ),
    ],
)
def test_key_without_an_equal_needs_newer_checkout(newer_file, change, where):
    path = newer_file(change)
    for refuse in (load, lambda path: prime_run(read(path))):
        with pytest.raises(UserError) as caught:
            refuse(path)
        assert caught.value.where == f"{path}: {where}"
    assert prime_run(read(path), release="v0.9").orchestrator.group_size == 8


@pytest.mark.parametrize(
    ("change", "key", "advice"),
    [
        (("batch_size = 16", "batch_size = 16\ngroup_size = 8"), "orchestrator.group_size", "train.group_size"),
        (("rank = 8", "rank = 8\n[trainer.loss]\nkl_tau = 0.1"), "trainer.loss.kl_tau", "no KL term"),
        (
            ('tasks_dir = "tasks"', 'tasks_dir = "tasks"\n[orchestrator.train.source.curriculum.gates]'),
            "orchestrator.train.source[0].curriculum",
            "constant_trainer_batch_size",
        ),
    ],
)
def test_keys_of_two_releases_in_one_file_are_refused(newer_file, change, key, advice):
    path = newer_file(change)
    with pytest.raises(UserError) as caught:
        read(path)
    assert caught.value.where == f"{path}: {key}"
    assert advice in caught.value.do


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("[trainer.model.lora]\nrank = 8", '[trainer]\nloss = "cispo"'), "trainer.loss"),
        (("[trainer.model.lora]\nrank = 8", '[trainer]\noptim = "muon"'), "trainer.optim"),
        (("[trainer.model.lora]\nrank = 8", '[trainer]\noptim = "None"'), "trainer.optim"),
        (('name = "first"', 'name = "first"\nalgo = "echo"'), "orchestrator.train.source[0].algo"),
        (('name = "held-out"', 'name = "held-out"\nselect = 3'), "orchestrator.eval.source[0].select"),
        (("select.limit = 10", "select = 10"), "orchestrator.eval.select"),
        (("env.timeout.episode = 600", 'env = "x"'), "orchestrator.train.env"),
    ],
)
def test_value_in_place_of_a_table_is_refused(newer_file, change, where):
    path = newer_file(change)
    with pytest.raises(UserError) as caught:
        load(path)
    assert caught.value.where.endswith(f": {where}")


@pytest.mark.parametrize(
    ("curriculum", "key"),
    [
        ("3", "curriculum"),
        ("{ gates = 3 }", "curriculum.gates"),
        ("{ gates.a = 3 }", "curriculum.gates.a"),
        ('{ samplr.type = "difficulty_pool" }', "curriculum.samplr"),
    ],
)
def test_newer_checkout_gets_no_pinned_file_with_a_wrong_curriculum(untold_file, curriculum, key):
    path = untold_file(("batch_size = 16", "batch_size = 16\ngroup_size = 4"), own_curriculum(curriculum))
    with pytest.raises(UserError) as caught:
        prime_run(read(path), release="v0.9")
    assert caught.value.where == f"{path}: orchestrator.train.source[0].{key}"


def test_pinned_file_is_checked_for_a_newer_checkout_too(untold_file):
    path = untold_file(("batch_size = 16", "batch_size = 16\ngroup_size = 4\nmax_off_policy_step = 2"))
    with pytest.raises(UserError, match=r"did you mean orchestrator\.max_off_policy_steps") as caught:
        prime_run(read(path), release="v0.9")
    assert caught.value.where == f"{path}: orchestrator.max_off_policy_step"


def test_newer_checkout_checks_a_file_that_tells_no_release_itself(untold_file):
    path = untold_file(("rank = 8", "rank = 8\n[trainer.model.fusions]\nenabled = []"))
    assert prime_run(read(path), release="v0.9").run.name == "newer"


def own_curriculum(text: str) -> tuple[str, str]:
    return 'name = "first"', f'name = "first"\ncurriculum = {text}'


def test_error_names_key_as_file_spells_it(newer_file):
    path = newer_file(("group_size = 8", 'group_size = "many"'))
    raw = read(path)
    with pytest.raises(UserError) as caught, raw.locating_errors():
        prime_run(raw)
    assert caught.value.where == f"{path}: orchestrator.train.group_size"


def test_options_take_newer_names(newer_file):
    words = ["--orchestrator.train.group-size", "4", "--orchestrator.train.algo.type", "grpo"]
    words += ["--no-orchestrator.constant-trainer-batch-size", "--orchestrator.eval.source.0.select.limit", "7"]
    orchestrator = load(newer_file(), words).orchestrator
    assert orchestrator.eval is not None
    assert (orchestrator.group_size, orchestrator.algo.type) == (4, "grpo")
    assert (orchestrator.train.source[0].curriculum, orchestrator.eval.source[0].num_examples) == (None, 7)


UNTOLD = {
    "group_size = 8\nenv.timeout.episode = 600": "",
    '[orchestrator.train.algo]\ntype = "max_rl"': "",
    "select.limit = 10": "",
}
"""Changes that leave only keys which both releases have."""


@pytest.fixture
def untold_file(newer_file):
    def write(*changes: tuple[str, str]) -> Path:
        return newer_file(*UNTOLD.items(), *changes)

    return write


def test_option_does_not_change_the_release_of_a_file(untold_file):
    path = untold_file()
    plain = load(path, ["--orchestrator.group-size", "8"])
    assert load(path, ["--orchestrator.train.group-size=8"]) == plain
    assert (plain.orchestrator.group_size, plain.trainer.loss.type) == (8, "default")


@pytest.mark.parametrize("words", [["--orchestrator.eval.num-examples", "-1"], ["--orchestrator.group-size", "4"]])
def test_newer_file_takes_options_with_pinned_names(newer_file, words):
    orchestrator = load(newer_file(), words).orchestrator
    assert orchestrator.eval is not None
    expected = (8, -1) if words[1] == "-1" else (4, 10)
    assert (orchestrator.group_size, orchestrator.eval.source[0].num_examples) == expected


def test_error_names_the_option_as_it_was_typed(untold_file):
    with pytest.raises(UserError) as caught:
        load(untold_file(), ["--orchestrator.train.group-size", "0"])
    assert caught.value.where == "command line: --orchestrator.train.group-size"


def test_pinned_file_refuses_an_option_without_a_pinned_name(untold_file):
    with pytest.raises(UserError) as caught:
        load(untold_file(), ["--no-orchestrator.constant-trainer-batch-size"])
    assert caught.value.where == "command line: --orchestrator.constant-trainer-batch-size"
    assert "--to v0.9" in caught.value.do


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("[trainer.optim]\nlr = 1e-5", None),
        ('[trainer.loss]\ntype = "ipo"', None),
        ('[trainer.loss]\ntype = "cispo"', "v0.9"),
        ('[trainer.loss]\ntype = "ipo"\neps = 0.2', "v0.9"),
        ('[trainer.loss]\ntype = "ipo"\nscore_centering = true', "v0.9"),
        ('[trainer.optim]\nweight_decay = "auto"', "v0.9"),
        ('[trainer.loss]\ntype = "cispo"\n[orchestrator]\ngroup_size = 4', "pin"),
        ('[trainer.loss]\ntype = "default"', "pin"),
        ("[orchestrator]\nenv_server_base_port = 6000", "pin"),
    ],
)
def test_release_of_a_file_without_renamed_keys(text, release):
    assert release_of(tomllib.loads(text)) == release


def test_newer_value_brings_newer_defaults_and_a_note(untold_file):
    config = load(untold_file(("rank = 8", 'rank = 8\n[trainer.loss]\ntype = "cispo"')))
    assert config.trainer.optim.weight_decay == 0
    assert any("defaults of newer Prime-RL" in note and "trainer.loss.type" in note for note in config.notes)


def test_newer_checkout_names_the_release_it_assumes(newer_file, untold_file):
    path = untold_file()
    assert assumed_note(read(path), "pin") == []
    assert [str(path) in note and "v0.9" in note for note in assumed_note(read(path), "v0.9")] == [True]
    assert assumed_note(read(newer_file()), "v0.9") == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("rank = 8", 'rank = 8\n[trainer.loss]\ntype = "cispo"'), "trainer.loss.type"),
        (("rank = 8", "rank = 8\n[trainer.loss]\nmax_importance_ratio = 9.0"), "trainer.loss.max_importance_ratio"),
        (('type = "max_rl"', 'loss_aggregation = "prompt"'), "orchestrator.train.algo.loss_aggregation"),
        (("group_size = 8", "group_size = 8\nsampling.top_p = 0.9"), "orchestrator.train.sampling.top_p"),
    ],
)
def test_upgrade_to_the_pin_refuses_what_it_cannot_read(newer_file, change, where, tmp_path):
    path = newer_file(change)
    with pytest.raises(UserError) as caught:
        upgrade_file(path, tmp_path / "pinned.toml", "pin")
    assert caught.value.where == f"{path}: {where}"
    assert not (tmp_path / "pinned.toml").exists()


def test_only_the_pinned_commit_refuses_a_newer_loss(newer_file):
    path = newer_file(("rank = 8", 'rank = 8\n[trainer.loss]\ntype = "cispo"'))
    with pytest.raises(UserError, match="no loss 'cispo' at the pinned commit; set default, ipo, custom"):
        prime_run(read(path))
    assert prime_run(read(path), release="v0.9").run.name == "newer"
    assert load(path).trainer.loss.type == "cispo"
    assert upgrade_file(path, None)[0].endswith("nothing to do, all key names are current")


def test_upgrade_says_which_release_it_assumed(untold_file, tmp_path):
    lines = upgrade_file(untold_file(), tmp_path / "out.toml", "v0.9")
    assert any("read with the defaults of the pinned commit" in line for line in lines)


def test_error_about_an_option_names_the_option(newer_file):
    raw = read(newer_file(), ["--orchestrator.train.group-size", "0"])
    with pytest.raises(UserError) as caught, raw.locating_errors():
        prime_run(raw)
    assert caught.value.where == "command line: --orchestrator.train.group-size"


def test_newer_checkout_checks_unknown_keys_itself(newer_file):
    path = newer_file(("rank = 8", "rank = 8\n[trainer.model.fusions]\nenabled = []"))
    assert prime_run(read(path), release="v0.9").run.name == "newer"
    with pytest.raises(UserError, match="fusions"):
        prime_run(read(path))


@pytest.mark.parametrize("name", ["harbor_8b", "harbor_8b_modal", "harbor_4b"])
def test_shipped_file_survives_both_translations(name):
    data = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    newer, notes = to_newer(data, name)
    assert release_of(newer) == "v0.9"
    assert notes == []
    assert newer["orchestrator"]["constant_trainer_batch_size"] is True
    assert newer["orchestrator"]["train"]["algo"] == data["orchestrator"]["algo"]
    assert newer["orchestrator"]["train"]["group_size"] == 16
    assert newer["trainer"]["loss"] == {"type": "ipo", "eps": 0.1}
    assert not {"algo", "group_size"} & newer["orchestrator"].keys()
    assert "curriculum" not in newer["orchestrator"]["train"]["source"][0]
    back, errors = to_pinned(newer, name)
    assert (back, errors) == (data, [])


PINNED = {
    "orchestrator": {
        "group_size": 4,
        "env_server_base_port": 6000,
        "train": {"source": [{"name": "a", "algo": {"length_penalty": {}}}]},
        "eval": {"num_examples": -1, "source": [{"num_examples": 5, "ratio": 2.0}]},
    },
    "trainer": {"loss": {"type": "ipo", "kl_tau": 0.01}},
}


def test_upgrade_sets_pinned_defaults_and_notes_differences():
    newer, notes = to_newer(PINNED, "f.toml")
    assert newer["orchestrator"] == {
        "constant_trainer_batch_size": False,
        "train": {"group_size": 4, "source": [{"name": "a", "algo": {"length_penalty": {}, "type": "grpo"}}]},
        "eval": {"source": [{"select": {"limit": 5}}]},
    }
    assert newer["trainer"] == {"loss": {"type": "ipo", "eps": 0.1}, "optim": {"weight_decay": 0.01}}
    assert "eps = 0.1, the pinned default, was written; the embedded engine took 0.3" in notes[1]
    assert [note.split(":")[0] for note in notes] == [
        "removed, because newer releases do not need them",
        "no eps is set",
        "newer releases have no KL term, which was kl_tau = 0.01 here",
    ]


def test_upgrade_notes_another_default_loss():
    _, notes = to_newer({"orchestrator": {"group_size": 2}}, "f.toml")
    assert notes == ["no loss is named: newer releases train with ipo, the pinned commit with DPPO and KL"]


def sources(**algos: dict | None) -> dict:
    """Return training sources by name, each with its own `algo` unless that is None."""
    found = [{"name": name} | ({} if algo is None else {"algo": algo}) for name, algo in algos.items()]
    return {"source": found}


def test_algorithm_of_a_source_replaces_the_shared_one_in_newer_releases_too():
    shared = {"type": "grpo", "length_penalty": {"num_turns_weight": 0.5}}
    orchestrator = {"algo": shared, "train": sources(a={"length_weighted_baseline": True}, b=None)}
    newer, _ = to_newer({"orchestrator": orchestrator}, "f.toml")
    assert "algo" not in newer["orchestrator"] and "algo" not in newer["orchestrator"]["train"]
    algos = [source["algo"] for source in newer["orchestrator"]["train"]["source"]]
    assert algos == [{"length_weighted_baseline": True, "type": "grpo"}, shared]


@pytest.mark.parametrize(("shared", "own"), [({}, {"type": "grpo"}), ({"type": "grpo"}, {}), ({}, {})])
def test_source_inherits_from_an_algorithm_without_a_type(shared, own):
    penalty = {"length_penalty": {"num_turns_weight": 0.5}}
    data, _ = to_pinned({"orchestrator": {"train": {"algo": shared | penalty} | sources(a=own)}}, "f.toml")
    assert data["orchestrator"]["train"]["source"][0]["algo"] == shared | own | penalty


def test_source_still_evaluates_all_its_tasks_under_a_shared_number():
    held_out = {"num_examples": 10, "source": [{"num_examples": -1}, {"num_examples": 5}, {}]}
    newer, _ = to_newer({"orchestrator": {"eval": held_out}}, "f.toml")
    assert newer["orchestrator"]["eval"] == {"source": [{}, {"select": {"limit": 5}}, {"select": {"limit": 10}}]}


ECHO = {"algo": {"type": "echo"}}


def test_gate_of_an_echo_source_is_named_in_a_note():
    for train in ([GATED | ECHO], [GATED, GATED | ECHO]):
        newer, notes = to_newer({"orchestrator": {"train": {"source": train}}, "trainer": {"loss": IPO}}, "f.toml")
        assert newer["orchestrator"]["constant_trainer_batch_size"] is True
        where = f"orchestrator.train.source[{len(train) - 1}]"
        assert notes == [f"newer releases replace no group of ECHO: the gate has no effect there ({where})"]


def test_echo_source_without_a_gate_survives_both_translations():
    train = {"group_size": 4, "source": [{"name": "a"}, {"name": "b", **ECHO}]}
    data, errors = to_pinned({"orchestrator": {"train": train}}, "f.toml")
    assert (["curriculum" in source for source in data["orchestrator"]["train"]["source"]], errors) == (
        [True, False],
        [],
    )
    newer, _ = to_newer(data, "f.toml")
    assert newer["orchestrator"]["constant_trainer_batch_size"] is True


IPO = {"type": "ipo", "ipo_threshold": 0.1, "kl_tau": 0.0}
GATED = {"curriculum": {"gates": {"g": {"type": "advantage_range"}}}}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"trainer": {"loss": {"type": "default"}}}, "trainer.loss.type"),
        ({"trainer": {"loss": {"kl_tau": 0.1}}}, "trainer.loss.type"),
        ({"trainer": {"loss": {"type": "ipo", "kl_tau": "x"}}}, "trainer.loss.kl_tau"),
        ({"orchestrator": {"token_batch_size": 10}}, "orchestrator.token_batch_size"),
        (
            {"orchestrator": {"train": {"filter_zero_advantages": False}}},
            "orchestrator.train.filter_zero_advantages",
        ),
        ({"orchestrator": {"train": {"source": [GATED, {}]}}}, "orchestrator.train.source"),
        ({"orchestrator": {"eval": {"num_examples": "many"}}}, "orchestrator.eval.num_examples"),
        (
            {"orchestrator": {"train": {"source": [{"curriculum": {"samplr": {}}}]}}},
            "orchestrator.train.source[0].curriculum.samplr",
        ),
        (
            {"orchestrator": {"train": {"source": [{"curriculum": {"gates": {"g": {"reject_max": 0.1}}}}]}}},
            "orchestrator.train.source[0].curriculum.gates.g",
        ),
    ],
)
def test_upgrade_refuses_what_newer_releases_cannot_say(data, key):
    with pytest.raises(UserError) as caught:
        to_newer(data, "f.toml")
    assert caught.value.where == f"f.toml: {key}"


def test_upgrade_command_writes_the_release_that_is_asked_for(newer_file, tmp_path):
    path = newer_file()
    assert upgrade_file(path, None)[0].endswith("nothing to do, all key names are current")
    lines = upgrade_file(path, tmp_path / "pinned.toml", "pin")
    assert lines[0] == "keys of Prime-RL v0.9 -> pin"
    assert prime_run(read(tmp_path / "pinned.toml")) == prime_run(read(path))
    upgrade_file(tmp_path / "pinned.toml", tmp_path / "again.toml", "v0.9")
    assert release_of(tomllib.loads((tmp_path / "again.toml").read_text())) == "v0.9"
    assert load(tmp_path / "again.toml").trainer.loss == load(path).trainer.loss


@pytest.mark.parametrize(
    ("pinned", "newer"),
    [
        ("orchestrator.algo.type", "orchestrator.train.algo.type"),
        ("orchestrator.train.source.curriculum.sampler.seed", "orchestrator.train.source.sampler.seed"),
        ("orchestrator.batch_size", "orchestrator.batch_size"),
    ],
)
def test_names_of_a_key(pinned, newer):
    assert (newer_key(pinned), pinned_key(newer)) == (newer, pinned)


def test_newer_name_keeps_index():
    assert newer_key("orchestrator.eval.source[2].num_examples") == "orchestrator.eval.source[2].select.limit"
    assert newer_key("orchestrator.train.source[0].ratio") == "orchestrator.train.source[0].ratio"
