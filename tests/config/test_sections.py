"""Sections of a TOML text: nothing of the text is lost, but for what tomlkit itself changes."""

import tomllib

import pytest

from harbortrainer.config.legacy import upgrade
from harbortrainer.config.sections import sections

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


def test_the_sections_are_the_text():
    assert sections(TRICKY).text == TRICKY + "\n", "the last line gets an end"


@pytest.mark.parametrize(
    "text", ["", "\n# alone\n\n", "x = 1\r\n[t] # y\r\n# z\r\n\r\n", INDENTED.replace("[z]\n", "")]
)
def test_spaces_empty_lines_and_ends_of_lines_stay(text):
    assert sections(text).text == text


def test_each_pair_knows_its_table_key_and_comment():
    found = [(s.table, s.array, s.around.comment, *pairs(s)) for s in sections(TRICKY)]
    assert found == [
        ("", False, "", ("a", "# x"), ('"b c"', "# yes")),
        ('t."u v"', False, "# head", ('t."u v".list', ""), ('t."u v".text', "# after")),
        ("many", True, "", ("many.inline", ""), ("many.last", "")),
    ]


def pairs(section):
    return [(path, line.item.trivia.comment) for path, line in section.pairs()]


def test_a_dotted_key_is_one_pair():
    (section,) = sections("a.b . c = 1 # x\n")
    assert pairs(section) == [("a.b . c", "# x")]


def test_an_inline_table_over_several_lines_becomes_one():
    text, notes = upgrade('a = {\n  b = "x  y", # why\n  c = [1,\n 2],\n}\n', "run.toml")
    assert text == '# why\na = { b = "x  y", c = [1, 2] }\n'
    assert notes == ["an inline table over several lines was read as TOML 1.1"]


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("a = { b = {\n c.d = 1_0,\n }, } # e\n", "a = { b = { c.d = 1_0 } } # e\n"),
        ("a = [ {\n  b = 1 # one\n}, {} ]\n", "a = [ {\n  b = 1 # one\n}, {} ]\n"),
        ("a = [ {\n  b = 0x10\n}, {} ]\n", "a = [{ b = 0x10 }, {}]\n"),
        ("a = {\n b = [ # one\n 1] }\nc = [\n 2, # two\n]\n", "a = { b = [ # one\n 1] }\nc = [\n 2, # two\n]\n"),
        ('a = {\n b = """\n#}""" }\n', 'a = { b = """\n#}""" }\n'),
    ],
)
def test_only_what_toml_1_0_cannot_read_is_joined(text, joined):
    assert upgrade(text, "run.toml")[0] == joined


@pytest.mark.parametrize("text", ["", "x = 1", "[t]\ny = 2\n\n# end\n"])
def test_a_pair_is_added_after_the_last_one_of_its_table(text):
    run = sections(text)
    run.put("t", "z", [1, "two"])
    assert run.data()["t"]["z"] == [1, "two"]
    assert "# end" not in text or run.text.endswith("# end\n")


def test_the_entries_of_an_array_that_stand_apart_come_together_and_no_comment_is_lost():
    text, _ = upgrade(APART, "run.toml")
    train = tomllib.loads(text)["orchestrator"]["train"]
    assert [source["env"]["taskset"]["tasks_dir"] for source in train["source"]] == ["one", "two"]
    assert train["sampling"] == {"max_completion_tokens": 8}
    assert all(text.count(f"# {comment}\n") == 1 for comment in ("first", "between", "second"))


def test_a_table_that_becomes_one_with_another_keeps_its_comments():
    text, _ = upgrade(
        "[inference.model] # one\na = 1 # A\n# below\n[inference.parallel] # two\ndp = 2 # B\n", "run.toml"
    )
    assert text == "[inference.vllm] # one\na = 1 # A\n# two\ndata_parallel_size = 2 # B\n# below\n"
