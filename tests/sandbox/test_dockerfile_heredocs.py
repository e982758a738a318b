"""Heredocs in Dockerfiles: detected like in BuildKit, and converted for older builders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.sandbox.dockerfile import extract_heredocs, inline_heredocs, normalize_heredocs, parse
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError

AFTER = "\nENV AFTER=1\n"


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        ("RUN <<EOF\na\n\nb\nEOF", [("EOF", "a\n\nb\n")]),
        ("RUN cat > /x <<'END'\na $B\nEND", [("END", "a $B\n")]),
        ("RUN cat > /x << 'END'\nimport json, os\nEND", [("END", "import json, os\n")]),
        ("RUN python3 <<   PY\nprint(1)\nPY", [("PY", "print(1)\n")]),
        ("RUN cat <<-EOF > /x\n\ta\n\tEOF", [("EOF", "a\n")]),
        ("RUN cat <<my-file.1 > /x\na\nmy-file.1", [("my-file.1", "a\n")]),
        ("COPY <<one <<two /srv/\n1\none\n2\ntwo", [("one", "1\n"), ("two", "2\n")]),
        ("RUN cat <<EOF > /x && \\\n  # why\n\n  echo done\na\nEOF", [("EOF", "a\n")]),
        ("run cat 3<<EOF\na\nEOF", [("EOF", "a\n")]),
    ],
)
def test_extracts_heredoc_bodies(text: str, bodies: list[tuple[str, str]]) -> None:
    plain, heredocs = extract_heredocs(f"FROM x\n{text}{AFTER}")
    assert heredocs == {1: bodies}
    assert plain.count("\n") == f"FROM x\n{text}{AFTER}".count("\n")
    assert [step.name for step in parse(f"FROM x\n{text}{AFTER}").steps][-1] == "ENV"


@pytest.mark.parametrize(
    "text",
    [
        'RUN python3 -c "print(1 << n)"\nn',
        "RUN python3 -c 'print(1<<n)'\nRUN n",
        "RUN echo $((1 << n)) > /x",
        "RUN cat<<EOF",
        "RUN cat <<< word > /x",
        'RUN ["cat", "<<EOF"]',
        'COPY --chown=1:1 ["<<EOF", "/x"]',
        "ENV SHIFT=1<<EOF",
        "# RUN cat <<EOF \\",
        "LABEL a='<<EOF'",
    ],
)
def test_ignores_text_that_only_looks_like_heredoc(text: str) -> None:
    dockerfile = f"FROM x\n{text}{AFTER}"
    assert extract_heredocs(dockerfile) == (dockerfile, {})
    assert normalize_heredocs(dockerfile) == dockerfile


def test_unterminated_heredoc_error_names_its_line() -> None:
    with pytest.raises(SandboxBuildError, match=r"Dockerfile line 3: the heredoc <<'EOF' has no end"):
        parse("FROM x\nENV A=1\nRUN cat <<'EOF'\na\n")


def test_normalize_removes_only_space_before_delimiter() -> None:
    text = "FROM x\nRUN cat > /a << 'EOF' && \\\n  cat > /b <<  END\n<< 'EOF' stays\nEOF\n2\nEND\nRUN echo '<< EOF'\n"
    normalized = text.replace("/a << 'EOF'", "/a <<'EOF'").replace("<<  END", "<<END")
    assert normalize_heredocs(text) == normalized
    assert inline_heredocs(text) == inline_heredocs(normalized)


def test_normalize_keeps_quoted_space_beside_heredoc() -> None:
    text = "FROM x\nRUN cat <<EOF > /a && echo '<< EOF'\n1\nEOF\n"
    assert normalize_heredocs(text) == text


def test_inline_heredocs_keeps_script() -> None:
    assert inline_heredocs("FROM x\nRUN cat > /a << 'EOF'\n$A\nEOF\n") == (
        'FROM x\nRUN ["/bin/sh", "-c", "cat > /a <<\'EOF\'\\n$A\\nEOF\\n"]\n'
    )


def run_inlined(instruction: str, folder: Path) -> str:
    """Run an instruction as rewritten for builders without heredocs; return its output."""
    command = json.loads(inline_heredocs(f"FROM x\n{instruction}").removeprefix("FROM x\nRUN "))
    env = {"PATH": os.environ["PATH"], "V": "val", "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def test_inlined_run_obeys_shebang(tmp_path: Path) -> None:
    script = 'import os\nprint(os.environ["V"], "$V `x`")\n'
    assert run_inlined(f"RUN <<EOF\n#!{sys.executable}\n{script}EOF\n", tmp_path) == "val $V `x`\n"
    assert not list(tmp_path.iterdir())
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        run_inlined("RUN <<EOF\n#!/bin/sh\nexit 3\nEOF\n", tmp_path)


def test_inlined_copy_replaces_only_variables(tmp_path: Path) -> None:
    """The expected text is that of BuildKit's `shell.Lex` with `SkipProcessQuotes`."""
    text = """$V ${V} ${W:-w} \\$V \\\\$V "$V" '$V' $(echo no) `echo no` $((1 + 1)) a\\n b\\\\n $1 $@ $? $ $\n"""
    run_inlined(f"COPY <<EOF file\n{text}EOF\n", tmp_path)
    expected = """val val w $V \\val "val" 'val' $(echo no) `echo no` $((1 + 1)) an b\\n    $ $\n"""
    assert (tmp_path / "file").read_text() == expected
