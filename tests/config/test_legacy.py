"""Old spellings keep their meaning and their comments."""

import tomllib

import pytest

from harbortrainer.config.legacy import upgrade
from harbortrainer.config.reader import load, read, upgrade_file
from harbortrainer.errors import UserError

ONE_LINE = """
[[orchestrator.env]]
id = "harbor_env"
name = "harbor"
args = { tasks_dir = "datasets/harbor_tasks", environment_type = "docker", vllm_base_url = "http://localhost:8000/v1", model_name = "Qwen/Qwen3-8B-Instruct", n_parallel_envs = 8, max_turns = 20 }
"""  # noqa: E501
SEVERAL_LINES = """
[[orchestrator.env]]
id = "harbor_env"
name = "harbor"
args = {
    tasks_dir = "datasets/harbor_tasks",
    environment_type = "docker",  # or "modal", "e2b", etc.
    vllm_base_url = "http://localhost:8000/v1",
    model_name = "Qwen/Qwen3-8B-Instruct",
    n_parallel_envs = 8,
    max_turns = 20,
}
"""
DOTTED = """
[[orchestrator.env]]
id = "harbor_env"
args.tasks_dir = "datasets/harbor_tasks"  # ours
args.environment_type = "docker"
args.vllm_base_url = "http://localhost:8000/v1"
args.model_name = "Qwen/Qwen3-8B-Instruct"
args.n_parallel_envs = 8
args.max_turns = 20
name = "harbor"
"""
TABLE = """
[[orchestrator.env]]
id = "harbor_env"
name = "harbor"

[orchestrator.env.args]
tasks_dir = "datasets/harbor_tasks"
environment_type = "docker"
# where it is served
vllm_base_url = "http://localhost:8000/v1"
model_name = "Qwen/Qwen3-8B-Instruct"
n_parallel_envs = 8  # at once
max_turns = 20

# the end
"""
WHOLE = """# My run
trainer_gpu_ids = [6, 7]  # the last two
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
max_steps = 200

[wandb]
project = "harbor"  # ours

[trainer.model.lora]
rank = 8

[orchestrator]
batch_size = 64
rollouts_per_example = 16  # a group

# where trials run
[[orchestrator.env]]
id = "harbor_env"  # the plugin
args = { tasks_dir = "t", n_parallel_envs = 8 }  # six settings
name = "harbor"

# how it samples
[orchestrator.sampling]
max_tokens = 1024

[inference.parallel]
dp = 6

[inference.model]
enforce_eager = true  # slow but sure
"""


def upgraded(text: str) -> dict:
    return tomllib.loads(upgrade(text, "run.toml")[0])


@pytest.mark.parametrize("text", [ONE_LINE, SEVERAL_LINES, DOTTED, TABLE])
def test_each_of_the_six_settings_keeps_its_meaning(text):
    data = upgraded(text)
    (source,) = data["orchestrator"]["train"]["source"]
    assert source["name"] == "harbor"
    assert source["env"]["taskset"] == {"id": "harbor_env", "tasks_dir": "datasets/harbor_tasks"}
    assert source["env"]["agent"]["max_turns"] == 20
    harness = {"id": "harbor_env", "environment_type": "docker", "n_parallel_envs": 8}
    assert source["env"]["agent"]["harness"] == harness
    assert data["orchestrator"]["model"]["client"]["base_url"] == "http://localhost:8000/v1"
    assert data["model"]["name"] == "Qwen/Qwen3-8B-Instruct"
    assert data["orchestrator"]["concurrency"]["max_inflight"] == 8
    assert "env" not in data["orchestrator"]


def test_the_chat_format_of_a_qwen3_is_named_since_its_name_alone_is_not_known():
    assert upgraded(ONE_LINE)["orchestrator"]["renderer"] == {"name": "qwen3", "thinking_retention": "all"}


def test_the_server_of_a_qwen3_tells_thinking_from_answers():
    hybrid = ONE_LINE.replace("Qwen3-8B-Instruct", "Qwen3-8B")
    assert upgraded(hybrid + "[inference.parallel]\ndp = 2\n")["inference"]["vllm"]["reasoning_parser"] == "qwen3"
    own = upgraded(hybrid + "[inference.vllm]\nreasoning_parser = 'None'\n")
    assert own["inference"]["vllm"]["reasoning_parser"] == "None"
    assert "inference" not in upgraded(hybrid), "no table, no server of Prime-RL's own"
    assert "reasoning_parser" not in str(upgraded(ONE_LINE + "[inference]\n")), "Instruct models do not think"


def test_one_line_says_what_was_translated():
    _, notes = upgrade(ONE_LINE, "run.toml")
    assert len(notes) == 1
    assert "[[orchestrator.env]] -> [[orchestrator.train.source]]" in notes[0]
    assert "harbortrainer config upgrade run.toml" in notes[0]


def test_every_comment_is_kept():
    text, _ = upgrade(WHOLE, "run.toml")
    for comment in ("My run", "the last two", "ours", "a group", "where trials run", "the plugin", "six settings"):
        assert f"# {comment}" in text
    assert text.index("# where trials run") < text.index("[[orchestrator.train.source]]")
    assert text.index("# how it samples") < text.index("[orchestrator.train.sampling]")
    assert '# or "modal", "e2b", etc.' in upgrade(SEVERAL_LINES, "run.toml")[0]


def test_the_comments_of_settings_move_with_them():
    assert 'tasks_dir = "datasets/harbor_tasks"  # ours\n' in upgrade(DOTTED, "run.toml")[0]
    text = upgrade(TABLE, "run.toml")[0]
    assert "n_parallel_envs = 8  # at once\n" in text
    assert text.index('name = "harbor"') < text.index("# where it is served") < text.index("# the end")


def test_empty_lines_and_the_order_of_tables_stay():
    text, _ = upgrade(WHOLE, "run.toml")
    tables = [line for line in text.splitlines() if line.startswith("[")]
    assert tables[:3] == ["[monitors.wandb]", "[trainer.model.lora]", "[orchestrator]"]
    assert text.startswith("# My run\nmax_steps = 200\n\n[monitors.wandb]\n")
    two = "[[orchestrator.env]]\nid = 'harbor_env'\nname = 'b'\n\n[[orchestrator.env]]\nid = 'harbor_env'\nname = 'a'\n"
    assert [source["name"] for source in upgraded(two)["orchestrator"]["train"]["source"]] == ["b", "a"]


def test_renamed_settings_get_their_new_names():
    data = upgraded(WHOLE)
    assert data["orchestrator"]["group_size"] == 16
    assert data["orchestrator"]["train"]["sampling"]["max_completion_tokens"] == 1024
    assert data["monitors"]["wandb"]["project"] == "harbor"
    assert data["deployment"] == {"num_infer_gpus": 6, "num_train_gpus": 2}
    assert data["inference"]["vllm"] == {"enforce_eager": True, "data_parallel_size": 6}
    assert data["orchestrator"]["concurrency"]["max_inflight"] == 16, "a group must fit"


def test_the_embedded_engine_reads_the_old_spelling(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(WHOLE)
    config = load(path)
    assert config.orchestrator.group_size == 16
    assert config.orchestrator.train.source[0].env["agent"]["harness"]["n_parallel_envs"] == 8
    assert len([note for note in config.notes if "old spelling" in note]) == 1


def test_a_file_in_todays_spelling_is_left_alone():
    text = '[[orchestrator.train.source]]\nenv = { taskset = { id = "harbor_env" } }  # x\n'
    assert upgrade(text, "run.toml") == (text, [])


def test_upgrading_twice_changes_nothing_more():
    text, _ = upgrade(WHOLE, "run.toml")
    assert upgrade(text, "run.toml") == (text, [])


def test_the_servers_port_follows_vllm_base_url():
    text = ONE_LINE.replace("8000", "8123") + "[inference]\n"
    assert upgraded(text)["inference"]["server"]["port"] == 8123


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('id = "harbor_env"', 'id = "wordle"'), "'wordle' is not ours"),
        (("max_turns = 20", "max_turn = 20"), "orchestrator.env[0].args.max_turn"),
        (("max_turns = 20", "max_turns = '20'"), "orchestrator.env[0].args.max_turns: must be a whole number"),
        (("n_parallel_envs = 8", "n_parallel_envs = [8]"), "args.n_parallel_envs: must be a whole number, not [8]"),
        (('"http://localhost:8000/v1"', "5"), "must be a text, not 5"),
        (("[[orchestrator.env]]", "trainer_gpu_ids = 3\n[[orchestrator.env]]"), "must be a list of devices"),
        (('name = "harbor"', 'colour = "red"'), "no translation"),
        (("[[orchestrator.env]]", '[model]\nname = "a/b"\n[[orchestrator.env]]'), "keep one of the two"),
        (("[[orchestrator.env]]", "[inference.model]\nx = 1\n[inference.vllm]\nx = 2\n[[orchestrator.env]]"), "both"),
        (("[[orchestrator.env]]", "[orchestrator.buffer]\nx = 1\n[[orchestrator.env]]"), "this setting is gone"),
    ],
)
def test_what_cannot_be_translated_is_refused_in_one_line(change, told):
    with pytest.raises(UserError) as caught:
        upgrade(ONE_LINE.replace(*change), "run.toml")
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_upgrade_command_keeps_the_old_file_beside_the_new_one(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(WHOLE)
    lines = upgrade_file(path, None)
    assert any("old spelling translated" in line for line in lines)
    assert (tmp_path / "run.toml.old").read_text() == WHOLE
    assert read(path).upgraded is None
    assert "nothing to do" in upgrade_file(path, None)[0]


def test_an_upgrade_that_fails_writes_nothing(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(ONE_LINE.replace("max_turns", "max_turn"))
    before = path.read_text()
    with pytest.raises(UserError):
        upgrade_file(path, None)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]
