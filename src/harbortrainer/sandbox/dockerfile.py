"""A task's Dockerfile as text: the steps that a root filesystem can carry out, the heredocs and the build context.

- `parse` returns a `Recipe`. Supported are FROM (not pulled), RUN in shell form, COPY from the task's folder, ENV,
  WORKDIR and USER. CMD, EXPOSE and LABEL change nothing in a trial. Every other instruction, flag and form is in
  `Recipe.unsupported`, with its name and line.
- `extract_heredocs` finds heredocs as BuildKit does: in RUN, COPY and ADD, as the unquoted words `<<NAME`, `<<-NAME`,
  `<<"NAME"` and `<< NAME` (BuildKit 0.22). No line is lost. A heredoc without an end is an error, except after a blank
  behind `<<`, as in `$((1 << n))`: that is no heredoc.
- `inline_heredocs` rewrites them for builders that have none. `RUN <<EOF` and `RUN command <<EOF` become RUN in JSON
  form; a body with `#!` runs as a program. COPY becomes a RUN that writes the file as the current user, with its
  variables replaced; `COPY --chown` and `--chmod` are refused.
- `context_digest` and `copy_sources` read the build context, and never a file outside the task's folder.
"""

import hashlib
import io
import json
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter, extract_key_values

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError

_INSTRUCTION = re.compile(r"\s*(?:RUN|COPY|ADD)\s+(?P<value>.*)", re.IGNORECASE | re.DOTALL)
_JSON = re.compile(r'(?:--\S+\s+)*\[\s*(?:"|\])')
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|["'\\])+""")
_START = re.compile(r"\d*<<(?P<tabs>-?)(?P<name>[^<]*)")
_QUOTES = re.compile(r"[\"'\\]")


@dataclass(frozen=True)
class _Heredoc:
    name: str
    spelled: str
    strips_tabs: bool
    is_apart: bool
    """Whether a blank separates `<<` from the name."""

    def end(self, lines: Sequence[str], start: int) -> int | None:
        """Return the number of the line that ends the heredoc."""
        return next((n for n in range(start, len(lines)) if self.stripped(lines[n]) == self.name), None)

    def stripped(self, line: str) -> str:
        return line.lstrip("\t") if self.strips_tabs else line


def extract_heredocs(text: str) -> tuple[str, dict[int, list[tuple[str, str]]]]:
    """Blank the lines of all heredocs, so that line numbers stay the same, and write `<< NAME` as `<<NAME`.

    An empty line inside an instruction becomes a backslash, so that the instruction continues.

    Returns:
        The text, and the heredocs as (name, content), by the number of their instruction's first line.

    Raises:
        SandboxBuildError: A heredoc has no end.
    """
    lines, out, bodies = _lines(text), [], {}
    while len(out) < len(lines):
        start = len(out)
        after = _end_of_instruction(lines, start)
        out += [line if line.strip() or after == start + 1 else "\\" for line in lines[start:after]]
        for heredoc in _heredocs(lines[start:after]):
            end = heredoc.end(lines, len(out))
            if end is None and heredoc.is_apart:
                continue
            if end is None:
                raise SandboxBuildError(f"Dockerfile line {start + 1}: the heredoc <<{heredoc.spelled} has no end")
            body = "".join(f"{heredoc.stripped(line)}\n" for line in lines[len(out) : end])
            bodies.setdefault(start, []).append((heredoc.name, body))
            if heredoc.is_apart:
                blank = re.compile(rf"<<[ \t]+(?={re.escape(heredoc.spelled)})")
                out[start:after] = [blank.sub("<<", line) for line in out[start:after]]
            out += [""] * (end + 1 - len(out))
    return "\n".join(out) + "\n", bodies


def normalize_heredocs(text: str) -> str:
    """Write each `<< NAME` as `<<NAME`, the form that every builder with heredocs supports."""
    plain, _ = extract_heredocs(text)
    return "".join(f"{new or old}\n" for old, new in zip(_lines(text), _lines(plain), strict=True))


def _lines(text: str) -> list[str]:
    """Split a Dockerfile as builders do: a form feed or U+2028 ends no line."""
    return text.removesuffix("\n").split("\n")


def _end_of_instruction(lines: Sequence[str], start: int) -> int:
    """Return the number of the line after the instruction, which empty lines and comments do not end."""
    if lines[start].lstrip().startswith("#"):
        return start + 1
    for number in range(start, len(lines)):
        line = lines[number].strip()
        inside = number > start and (not line or line.startswith("#"))
        if not inside and not line.endswith("\\"):
            return number + 1
    return len(lines)


def _heredocs(lines: Sequence[str]) -> Iterator[_Heredoc]:
    if not any("<<" in line for line in lines):
        return
    content = [line.rstrip().removesuffix("\\") for line in lines if not line.lstrip().startswith("#")]
    instruction = _INSTRUCTION.fullmatch(" ".join(content))
    if instruction is None or _JSON.match(instruction["value"]):
        return
    for word, following in pairwise([*_WORD.findall(instruction["value"]), ""]):
        start = _START.fullmatch(word)
        if start is None:
            continue
        is_apart = not start["name"] and not start["tabs"]
        spelled = following if is_apart else start["name"]
        if name := _QUOTES.sub("", spelled):
            yield _Heredoc(name, spelled, bool(start["tabs"]), is_apart)


_SUPPORTED = ("FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER")
_WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL")
"""Harbor starts a container with a command of its own, so CMD never runs."""
_DEFAULT = (re.compile(r"\$\{\w+[^\w}]"), "with more than a name in ${}")
_UNSUPPORTED_FORMS = {
    "COPY": ((re.compile(r"[*?\[]"), "with a pattern or a JSON list"), _DEFAULT),
    "ENV": ((re.compile(r"\A[^\s=]+(?:\s|\Z)"), "without ="), _DEFAULT),
    "WORKDIR": (_DEFAULT,),
    "USER": ((re.compile(r":"), "with a group"), _DEFAULT),
}
_FLAGS = re.compile(r"--\S+(?:\s+--\S+)*")


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    name: str
    value: str
    line: int

    def __str__(self) -> str:
        return f"{self.place} {self.value}"

    @property
    def place(self) -> str:
        """The step's line and name, for messages."""
        return f"Dockerfile line {self.line}: {self.name}"


@dataclass
class Recipe:
    """Steps of the last stage of a Dockerfile, in order."""

    base: str
    """The image that the last stage starts from."""
    steps: list[Step] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Parts of the Dockerfile that need an image, for messages."""


MAX_BYTES = 16 << 20
"""Largest Dockerfile that is read."""


def read_dockerfile(folder: Path) -> str:
    """Read a folder's Dockerfile without a byte order mark; SandboxBuildError if it is too large or not UTF-8."""
    with (folder / "Dockerfile").open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise SandboxBuildError(f"the Dockerfile is larger than {MAX_BYTES >> 20} MB")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise SandboxBuildError("the Dockerfile is not UTF-8 text") from None


def parse(text: str) -> Recipe:
    """Parse a Dockerfile into a recipe; SandboxBuildError if it is invalid."""
    text, heredocs = extract_heredocs(text)
    parser = DockerfileParser(fileobj=as_file(text))
    recipe = Recipe(_base(parser))
    is_in_stage = False
    for item in parser.structure:
        step = Step(item["instruction"], item["value"], item["startline"] + 1)
        if step.name in {"COMMENT", *_WITHOUT_EFFECT}:
            continue
        if unsupported := _unsupported(step, has_heredoc=item["startline"] in heredocs):
            recipe.unsupported.append(unsupported)
        if step.name != "FROM":
            recipe.steps.append(step)
            continue
        if is_in_stage:
            recipe.unsupported.append(f"{step.place} of a second stage")
        is_in_stage = True
        recipe.steps.clear()
    return recipe


def base_image(text: str) -> str:
    """Return the base image of a Dockerfile's last stage; SandboxBuildError if it is invalid."""
    return _base(DockerfileParser(fileobj=as_file(extract_heredocs(text)[0])))


def _base(parser: DockerfileParser) -> str:
    try:
        images = parser.parent_images
    except (ValueError, IndexError) as error:
        raise SandboxBuildError(f"the Dockerfile has an ARG that is not NAME=value: {error}") from error
    if not images:
        raise SandboxBuildError("the Dockerfile has no FROM")
    return images[-1]


def _unsupported(step: Step, *, has_heredoc: bool) -> str:
    """Describe the part of a step that needs an image; "" if a root filesystem can carry out the step."""
    if step.name not in _SUPPORTED:
        return str(step)
    if flags := _FLAGS.match(step.value):
        return f"{step.place} {flags[0]}"
    if has_heredoc:
        return f"{step.place} with a heredoc"
    if step.name == "RUN" and json_list(step.value) is not None:
        return f"{step.place} with a JSON list"
    forms = _UNSUPPORTED_FORMS.get(step.name, ())
    return next((f"{step.place} {words}" for pattern, words in forms if pattern.search(step.value)), "")


def as_file(text: str) -> io.BytesIO:
    """Wrap text as the file that dockerfile-parse expects."""
    return io.BytesIO(text.encode())


def json_list(text: str) -> list[str] | None:
    """Parse an instruction's JSON form; None if it has another form, which Docker runs as a shell command."""
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def substitute(text: str, env: dict[str, str]) -> str:
    """Replace `$X` and `${X}` and remove quotes."""
    return WordSplitter(text, args={}, envs=env).dequote()


def split_words(text: str, env: dict[str, str]) -> list[str]:
    """Split an instruction at unquoted blanks and replace variables."""
    return [substitute(word, env) for word in WordSplitter(text).split(dequote=False)]


def key_values(text: str, env: dict[str, str]) -> list[tuple[str, str]]:
    """Return the names and values of an ENV instruction."""
    try:
        return extract_key_values(env_replace=True, args={}, envs=env, instruction_value=text)
    except (ValueError, IndexError) as error:
        raise SandboxBuildError(f"not a list of NAME=value: {text} ({error})") from error


def context_digest(folder: Path) -> str:
    """Hash the names, modes and contents of a folder. A file is read again only if its size or time changed."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        sha.update(f"{path.relative_to(folder)}\0{info.st_mode:o}\0".encode())
        if stat.S_ISLNK(info.st_mode):
            sha.update(str(path.readlink()).encode())
        elif stat.S_ISREG(info.st_mode):
            sha.update(_content(str(path), info.st_size, info.st_mtime_ns, info.st_ino))
    return sha.hexdigest()


@lru_cache(maxsize=65536)
def _content(path: str, size: int, mtime_ns: int, inode: int) -> bytes:
    del size, mtime_ns, inode  # part of the cache key only
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def copy_sources(folder: Path, names: list[str]) -> list[Path]:
    """Return the paths that a COPY names; SandboxBuildError if one is missing or outside the folder."""
    found = [folder / os.path.normpath("/" + name).lstrip("/") for name in names]
    for name, path in zip(names, found, strict=True):
        if not path.exists():
            raise SandboxBuildError(f"COPY: {name!r} is not in the task's environment folder")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SandboxBuildError(f"COPY: {path.relative_to(folder)} leads out of the task's environment folder")
    return found


_HEREDOC_FLAGS = re.compile(r"\A(?:--\S+\s+)+")
_HEREDOC_START = re.compile(r"<<-?[\"']?[^\s\"'<]+[\"']?")


def inline_heredocs(text: str) -> str:
    """Replace every heredoc for builders without them. Line numbers change."""
    plain, bodies = extract_heredocs(text)
    lines, shell = [], ["/bin/sh", "-c"]
    for item in DockerfileParser(fileobj=as_file(plain)).structure:
        name, value = item["instruction"].upper(), item["value"]
        if name == "FROM":
            shell = ["/bin/sh", "-c"]
        elif name == "SHELL":
            shell = json_list(value) or shell
        own = bodies.get(item["startline"], [])
        lines.append(_instruction(name, value, own, shell) if own else item["content"].rstrip("\n"))
    return "\n".join(lines) + "\n"


def _instruction(name: str, value: str, bodies: list[tuple[str, str]], shell: list[str]) -> str:
    if name == "RUN":
        script = _HEREDOC_FLAGS.sub("", value)
        flags = value.removesuffix(script)
        return f"RUN {flags}{json.dumps(_run(script, bodies, shell))}"
    return f"RUN {json.dumps(['/bin/sh', '-c', _copy(value, bodies)])}"


def _run(value: str, bodies: list[tuple[str, str]], shell: list[str]) -> list[str]:
    """Return the command of a RUN with heredocs; of `RUN <<EOF` alone it is the body, with `#!` as a program."""
    alone = [f"<<{bodies[0][0]}", f"<<-{bodies[0][0]}"] if len(bodies) == 1 else []
    if value.replace('"', "").replace("'", "").strip() not in alone:
        return [*shell, value + "".join(f"\n{text}{word}" for word, text in bodies) + "\n"]
    word, body = bodies[0]
    if not body.startswith("#!"):
        return [*shell, body]
    return ["/bin/sh", "-c", f"{_MAKE_PROGRAM} <<'{word}'\n{body}{word}\n{_RUN_PROGRAM}"]


_MAKE_PROGRAM = 'set -e\nprogram=$(mktemp)\ncat > "$program"'
_RUN_PROGRAM = 'chmod 755 "$program"\ncode=0\n"$program" || code=$?\nrm "$program"\nexit $code\n'


def _copy(value: str, bodies: list[tuple[str, str]]) -> str:
    """Return a script that writes the files of a COPY."""
    if value.startswith("--") or len(_HEREDOC_START.findall(value)) != len(value.split()) - 1:
        raise SandboxBuildError(f"COPY {value}: this builder has no heredocs; put the file into the task's folder")
    target = value.split()[-1]
    script = ["set -e"]
    for word, body in bodies:
        path = posixpath.join(target, word) if target.endswith("/") or len(bodies) > 1 else target
        if re.search(rf"<<-?[\"']{re.escape(word)}[\"']", value):
            quoted = f"'{word}'"
        else:
            quoted, body = word, _NOT_VARIABLE.sub(_as_shell, body)
        folder = shlex.quote(posixpath.dirname(path) or ".")
        script += [f"mkdir -p {folder}", f"cat > {shlex.quote(path)} <<{quoted}", f"{body}{word}"]
    return "\n".join(script) + "\n"


_NOT_VARIABLE = re.compile(r"\\(?P<escaped>.)|`|\$(?P<special>[@*#?$!-]|\d+)|\$(?![A-Za-z_{])", re.DOTALL)
"""What a shell would treat otherwise than BuildKit, which replaces nothing but variables, and removes backslashes."""


def _as_shell(found: re.Match[str]) -> str:
    """Return the text that a shell's heredoc turns into what BuildKit makes of it."""
    if found["special"]:
        return ""
    literal = found["escaped"] or found[0]
    return f"\\{literal}" if literal in "$`\\" else literal
