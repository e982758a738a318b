"""The prose check finds what it is for, and leaves code and links alone."""

import pytest
from check_prose import findings, main

LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"# Title\n\n{LONG}.\n", ["page.md:3: 31 words"]),
        (f"A short sentence. W{LONG[6:]}.\n", []),
        (f"- {LONG[5:]}\n- {LONG[5:]}\n", []),
        (f"| key | {LONG} |\n", ["page.md:1: 31 words"]),
        (f"```\n{LONG} is told\n```\n`is told` ends.\n", []),
        (f"[one two]({LONG.replace(' ', '/')}) {' '.join(['word'] * 28)}\n", []),
        ("The user\nis told.\n", ["page.md:1: banned words 'is told'"]),
    ],
)
def test_finds_long_sentences_and_banned_words_in_pages(tmp_path, monkeypatch, text, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert [
        line.split(",")[0].split(": The")[0] for line in findings((tmp_path / "page.md").relative_to(tmp_path))
    ] == found


def test_reads_docstrings_and_messages_of_python_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = f'''"""A module.

Args:
    a: {LONG[10:]}
    b: {LONG[10:]}
"""
# {LONG}
x = 1
message = f"{LONG} {{x}}"
other = "the user is told about it"
'''
    (tmp_path / "module.py").write_text(code)
    assert main(["module.py"]) == 1
    found = [line.split(": ")[0] for line in findings((tmp_path / "module.py").relative_to(tmp_path))]
    assert found == ["module.py:9", "module.py:10"]


def test_is_silent_on_plain_prose(tmp_path, capsys):
    (tmp_path / "page.md").write_text("Subject, verb, object.\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "prose: 0 findings\n"
