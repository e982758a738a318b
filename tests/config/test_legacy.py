"""Translation of old key names."""

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

TRICKY = '''a = 1 # x
"b c" = "#no" # yes
[t."u v"] # head
list = [
  1, # one
  "]",
]
text = """
# no comment
[no.table]
""" # after
[[many]]
inline = { a = "}", b = 2 }
last = 'no end of line\''''
INDENTED = """  [a]  # head
   b.c . d  =  2 # h

  # before c
  [[a.c]] # x
  e   = 0x1F
[a.c.f]
\tg = 1_000

[z]
[[a.c]]
# end
"""
APART = """[orchestrator]
# first
[[orchestrator.env]]
id = "harbor_env"
args.tasks_dir = "one"
# between
[orchestrator.sampling]
max_tokens = 8
# second
[[orchestrator.env]]
id = "harbor_env"
args.tasks_dir = "two"
"""


def upgraded(text: str) -> dict:
    return tomllib.loads(upgrade(text, "run.toml")[0])


@pytest.mark.parametrize("text", [ONE_LINE, SEVERAL_LINES, DOTTED, TABLE])
def test_each_of_the_six_settings_is_translated(text):
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


def test_qwen3_gets_an_explicit_chat_format():
    assert upgraded(ONE_LINE)["orchestrator"]["renderer"] == {"name": "qwen3", "thinking_retention": "all"}


def test_qwen3_server_gets_a_reasoning_parser():
    hybrid = ONE_LINE.replace("Qwen3-8B-Instruct", "Qwen3-8B")
    assert upgraded(hybrid + "[inference.parallel]\ndp = 2\n")["inference"]["vllm"]["reasoning_parser"] == "qwen3"
    own = upgraded(hybrid + "[inference.vllm]\nreasoning_parser = 'None'\n")
    assert own["inference"]["vllm"]["reasoning_parser"] == "None"
    assert "inference" not in upgraded(hybrid), "no table, no server of Prime-RL's own"
    assert "reasoning_parser" not in str(upgraded(ONE_LINE + "[inference]\n")), "Instruct models do not think"


def test_note_lists_translations_in_one_line():
    _, notes = upgrade(ONE_LINE, "run.toml")
    assert len(notes) == 1
    assert "[[orchestrator.env]] -> [[orchestrator.train.source]]" in notes[0]
    assert "harbortrainer config upgrade run.toml" in notes[0]
    assert "`harbortrainer config upgrade 'my run.toml'`" in upgrade(ONE_LINE, "my run.toml")[1][0]


def test_order_of_entries_is_kept():
    two = "[[orchestrator.env]]\nid = 'harbor_env'\nname = 'b'\n\n[[orchestrator.env]]\nid = 'harbor_env'\nname = 'a'\n"
    assert [source["name"] for source in upgraded(two)["orchestrator"]["train"]["source"]] == ["b", "a"]


def test_translated_sources_come_after_current_ones():
    both = ONE_LINE + "[[orchestrator.train.source]]\nname = 'today'\n"
    assert [source["name"] for source in upgraded(both)["orchestrator"]["train"]["source"]] == ["today", "harbor"]


def test_separated_array_entries_are_merged():
    train = upgraded(APART)["orchestrator"]["train"]
    assert [source["env"]["taskset"]["tasks_dir"] for source in train["source"]] == ["one", "two"]
    assert train["sampling"] == {"max_completion_tokens": 8}


def test_old_keys_in_dotted_and_inline_tables_are_translated():
    assert upgraded('wandb.project = "p"\n') == {"monitors": {"wandb": {"project": "p"}}}
    data = upgraded("orchestrator = { sampling = { max_tokens = 8 }, env = [{ id = 'harbor_env' }] }\n")
    assert data["orchestrator"]["train"]["sampling"] == {"max_completion_tokens": 8}
    assert data["orchestrator"]["train"]["source"][0]["env"]["taskset"] == {"id": "harbor_env"}


def test_merged_tables_keep_their_keys():
    text = "[inference.model]\na = 1\n[inference.parallel]\ndp = 2\n[wandb]\n'b.c' = 1\n[monitors.wandb]\nd = 2\n"
    vllm = {"a": 1, "data_parallel_size": 2}
    assert upgraded(text) == {"inference": {"vllm": vllm}, "monitors": {"wandb": {"b.c": 1, "d": 2}}}


def test_emptied_parent_table_is_removed():
    text = "[trainer.model.experimental.lora]\nrank = 8\n"
    assert upgraded(text) == {"trainer": {"model": {"lora": {"rank": 8}}}}


def test_multi_line_inline_table_is_rewritten():
    text, notes = upgrade('a = {\n  b = "x  y", # why\n  c = [1,\n 2],\n}\n', "run.toml")
    assert tomllib.loads(text) == {"a": {"b": "x  y", "c": [1, 2]}}
    assert notes == ["the file was read as TOML 1.1, because it has multi-line inline tables"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a = { b = {\n c.d = 1_0,\n }, } # e\n", {"a": {"b": {"c": {"d": 10}}}}),
        ("a = [ {\n  b = 1 # one\n}, {} ]\n", {"a": [{"b": 1}, {}]}),
        ("a = [ {\n  b = 0x10\n}, {} ]\n", {"a": [{"b": 16}, {}]}),
        ("a = {\n b = [ # one\n 1] }\nc = [\n 2, # two\n]\n", {"a": {"b": [1]}, "c": [2]}),
        ('a = {\n b = """\n#}""" }\n', {"a": {"b": "#}"}}),
    ],
)
def test_toml_1_1_keeps_its_values(text, read):
    assert upgraded(text) == read


@pytest.mark.parametrize("text", ["", "\n# alone\n\n", TRICKY, INDENTED, "a = {\n b = ]\n"])
def test_text_without_old_keys_is_unchanged(text):
    assert upgrade(text, "run.toml") == (text, [])


@pytest.mark.parametrize("text", [TRICKY, INDENTED])
def test_values_next_to_an_old_table_are_kept(text):
    assert upgraded(f"{text}\n[wandb]\n") == tomllib.loads(text) | {"monitors": {"wandb": {}}}


def test_renamed_settings_are_translated():
    data = upgraded(WHOLE)
    assert data["orchestrator"]["group_size"] == 16
    assert data["orchestrator"]["train"]["sampling"]["max_completion_tokens"] == 1024
    assert data["monitors"]["wandb"]["project"] == "harbor"
    assert data["deployment"] == {"num_infer_gpus": 6, "num_train_gpus": 2}
    assert data["inference"]["vllm"] == {"enforce_eager": True, "data_parallel_size": 6}
    assert data["orchestrator"]["concurrency"]["max_inflight"] == 16, "a group must fit"


def test_embedded_engine_reads_old_keys(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(WHOLE)
    config = load(path)
    assert config.orchestrator.group_size == 16
    assert config.orchestrator.train.source[0].env["agent"]["harness"]["n_parallel_envs"] == 8
    assert len([note for note in config.notes if "old keys translated" in note]) == 1


def test_file_with_current_keys_is_unchanged():
    text = '[[orchestrator.train.source]]\nenv = { taskset = { id = "harbor_env" } }  # x\n'
    assert upgrade(text, "run.toml") == (text, [])


def test_upgrade_is_idempotent():
    text, _ = upgrade(WHOLE, "run.toml")
    assert upgrade(text, "run.toml") == (text, [])


def test_server_port_follows_vllm_base_url():
    text = ONE_LINE.replace("8000", "8123") + "[inference]\n"
    assert upgraded(text)["inference"]["server"]["port"] == 8123


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('id = "harbor_env"', 'id = "wordle"'), "'wordle' cannot be translated"),
        (("max_turns = 20", "max_turn = 20"), "orchestrator.env[0].args.max_turn"),
        (("max_turns = 20", "max_turns = '20'"), "orchestrator.env[0].args.max_turns: must be an integer"),
        (("n_parallel_envs = 8", "n_parallel_envs = [8]"), "args.n_parallel_envs: must be an integer, not [8]"),
        (('"http://localhost:8000/v1"', "5"), "must be a string, not 5"),
        (("[[orchestrator.env]]", "trainer_gpu_ids = 3\n[[orchestrator.env]]"), "must be a list of devices"),
        (('name = "harbor"', 'colour = "red"'), "colour: cannot be translated"),
        (("[[orchestrator.env]]", '[model]\nname = "a/b"\n[[orchestrator.env]]'), "keep one of the two"),
        (("[[orchestrator.env]]", "[inference.model]\nx = 1\n[inference.vllm]\nx = 2\n[[orchestrator.env]]"), "both"),
        (("[[orchestrator.env]]", "[orchestrator.buffer]\nx = 1\n[[orchestrator.env]]"), "this key no longer exists"),
    ],
)
def test_untranslatable_key_gives_one_line_error(change, message):
    with pytest.raises(UserError) as caught:
        upgrade(ONE_LINE.replace(*change), "run.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_upgrade_command_keeps_the_old_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(WHOLE)
    lines = upgrade_file(path, None)
    assert any("old keys translated" in line for line in lines)
    assert lines[-1] == f"written to {path} without comments; the old file is {path}.old"
    assert (tmp_path / "run.toml.old").read_text() == WHOLE
    assert read(path).upgraded is None
    assert "nothing to do" in upgrade_file(path, None)[0]


def test_failed_upgrade_writes_nothing(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(ONE_LINE.replace("max_turns", "max_turn"))
    before = path.read_text()
    with pytest.raises(UserError):
        upgrade_file(path, None)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]
