"""Statements of a TOML text: nothing of the text is lost."""

import pytest

from harbortrainer.config.document import Document
from harbortrainer.config.toml_lines import one_line, statements

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


def test_the_statements_are_the_text():
    assert "".join(statement.text for statement in statements(TRICKY)) == TRICKY


def test_each_statement_knows_its_table_key_and_comment():
    found = [(s.kind, s.path, s.comment) for s in statements(TRICKY)]
    assert found == [
        ("pair", "a", "# x"),
        ("pair", '"b c"', "# yes"),
        ("table", "t.u v".replace(" ", ""), "# head"),
        ("pair", "t.uv.list", ""),
        ("pair", "t.uv.text", "# after"),
        ("array", "many", ""),
        ("pair", "many.inline", ""),
        ("pair", "many.last", ""),
    ]


def test_an_inline_table_over_several_lines_becomes_one():
    line, comments = one_line('a = {\n  b = "x  y", # why\n  c = [1,\n 2],\n}\n')
    assert line == 'a = { b = "x  y", c = [1, 2] }'
    assert comments == ["# why"]


@pytest.mark.parametrize("text", ["", "x = 1", "[t]\ny = 2\n\n# end\n"])
def test_a_pair_is_added_after_the_last_one_of_its_table(text):
    document = Document(text)
    document.put("t", "z", [1, "two"])
    assert document.data()["t"]["z"] == [1, "two"]
    assert "# end" not in text or document.text.endswith("# end\n")
