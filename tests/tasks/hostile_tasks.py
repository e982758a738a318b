"""Makers of hostile task folders and archives: one seed gives one case, always the same."""

import gzip
import io
import os
import random
import shutil
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

from task_sets import packed

TASK = """version = "1.0"
[agent]
timeout_sec = 20.0
[verifier]
timeout_sec = 20.0
[environment]
allow_internet = false
"""
DEPTH, LONG_S = 100_000, "9" * 5000
NAMES = ("task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh", "environment/Dockerfile")
FOLDERS = ("tests", "solution", "environment", "steps", "environment/data")
TARGETS = (".", "..", "/", "none", "/dev/zero", "/dev/null", "/etc/passwd", "/proc/self/mem", "../../..")
FILE_NAMES = (b"caf\xe9", b"a\nb", b"\x1b[2J", b"-rf", b"n" * 255, b"a b", "\u2028".encode(), b"\xed\xa0\x80", b"$(id)")
LINES = (
    f"timeout_sec = {LONG_S}",
    f"x = {'[' * DEPTH}",
    f"x = {'{a=' * 2000}1{'}' * 2000}",
    f"{'.'.join('a' * 2000)} = 1",
    "[environment]\nworkdir = []",
    "[environment.env]\nA = {}",
    "[environment.healthcheck]\ncommand = 5",
    "[[environment.mcp_servers]]\nname = []",
    "[[artifacts]]\nservice = []",
    "[[verifier.collect]]\nservice = {}",
    '[[steps]]\nname = "a"\n[[steps]]\nname = "a"',
    '[[steps]]\nname = "a"\nverifier = 5',
    '[[steps]]\nname = "tests"',
    '[task]\nname = "x"\nkeywords = 1',
    "[verifier]\nenvironment_mode = []",
    '[verifier]\nenvironment_mode = "separate"',
    "[verifier.environment]\ndocker_image = {}",
    '[environment.env]\nA = "${B:-${C}}"\n',
    '[metadata]\ntags = [1, [], {}]\ncategory = ""',
    "a = 0000-00-00",
    "\ufeffversion = 1",
)
DOCKERFILES = (
    b"",
    b"FROM",
    b"FROM \xff\n",
    b"FROM a AS a\nFROM a\nCOPY --from=a / /\n",
    b"FROM debian\nRUN <<E\n",
    b"FROM debian\nCOPY [ /\n",
    b'FROM debian\nCOPY ["a", 5] /\n',
    b"FROM debian\nCOPY ../../../etc/passwd /\n",
    b"FROM debian\nCOPY ** **\n",
    b"FROM $A$A$A\nARG A=$A\n",
    b"ARG A=${A:-${A:-\nFROM ${A\n",
    b"FROM debian\nENV " + b"A=1 " * 20_000,
    b"FROM debian\nENV A='\n",
    b"FROM debian\nUSER \x00\nWORKDIR \x00\n",
    b"FROM debian\n" + b"\\\n" * 20_000,
    b"# escape=`\nFROM debian`\n",
)
BILLION = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
COMPOSE = (
    BILLION,
    "services: &a\n  main: *a\n",
    "[" * 5000,
    "- " * 5000,
    "!!python/object/apply:os.system [id]",
    "services: [main]",
    "services: {main: 5}",
    "services: {main: {volumes: 5, devices: {}, environment: [5, null], cap_add: x}}",
    "services: {main: {volumes: [{type: bind}, 5, null], env_file: {path: 5}}}",
    "? [a]\n: b",
    "\x00",
    "services:\n\tmain:",
    "{{{",
)
VERIFIERS = (
    b"exit 1",
    b"mkdir /logs/verifier/reward.txt",
    b"echo nan > /logs/verifier/reward.txt",
    b"echo 1e999 > /logs/verifier/reward.txt",
    b"head -c 3000000 /dev/zero > /logs/verifier/reward.txt",
    b"printf '\\377' > /logs/verifier/reward.txt",
    b"head -c 200000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json",
    b"head -c 20000 /dev/zero | tr '\\0' 9 > /logs/verifier/reward.json",
    b"echo '{\"reward\": null}' > /logs/verifier/reward.json",
    b"ln -s reward.json /logs/verifier/reward.json",
    b"ln -s /etc/passwd /logs/verifier/reward.txt",
    b"mkfifo /logs/verifier/reward.txt",
    b"printf '\\377\\033[2J'; echo 1 > /logs/verifier/reward.txt",
    b"rm -rf /logs /tests; echo 1",
    b"\x00\x7fELF",
)


NUMBERS = ("inf", "-inf", "nan", "0", "-1", "-0.5", '"inf"', '"nanG"', "1e400", LONG_S, '"-5"', "true", "0x7fffffff")
NUMBER_KEYS = (
    "[agent]\ntimeout_sec",
    "[verifier]\ntimeout_sec",
    "[environment]\nbuild_timeout_sec",
    "[environment]\nmemory_mb",
    "[environment]\nstorage_mb",
    "[environment]\ncpus",
    "[environment]\nmemory",
    "[environment]\nstorage",
    '[environment.healthcheck]\ncommand = "true"\ntimeout_sec',
    '[environment.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\nstart_period_sec',
    '[[verifier.collect]]\ncommand = "true"\ntimeout_sec',
)
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


def honest(folder: Path, instruction: str = "Make /tmp/answer.") -> Path:
    """Write a task that its solution solves and that doing nothing does not."""
    files = {
        "task.toml": TASK,
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
        "solution/solve.sh": "touch /tmp/answer\n",
        "tests/test.sh": "test -f /tmp/answer && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _cleared(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _links(task: Path, rng: random.Random) -> None:
    path = _cleared(task / rng.choice(NAMES + FOLDERS))
    path.symlink_to(rng.choice((path.name, *TARGETS)))


def _looping_links(task: Path, rng: random.Random) -> None:
    folder = task / rng.choice(("", "tests", "environment", "solution"))
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")


def _special_file(task: Path, rng: random.Random) -> None:
    path = _cleared(task / rng.choice((*NAMES, "tests/extra", "environment/extra")))
    if rng.random() < 0.7:
        os.mkfifo(path)
        return
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _folder_for_a_file(task: Path, rng: random.Random) -> None:
    (_cleared(task / rng.choice(NAMES)) / "x").mkdir(parents=True)


def _missing(task: Path, rng: random.Random) -> None:
    _cleared(task / rng.choice((*NAMES, "tests", "solution", "environment")))


def _sparse(task: Path, rng: random.Random) -> None:
    path = _cleared(task / rng.choice((*NAMES, "environment/data.bin")))
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _odd_name(task: Path, rng: random.Random) -> None:
    folder = os.fsencode(task / rng.choice(("", "tests", "environment", "solution")))
    with open(os.path.join(folder, rng.choice(FILE_NAMES)), "wb") as file:  # noqa: PTH118, PTH123 - names of bytes
        file.write(b"x")


def _deep_folders(task: Path, rng: random.Random) -> None:
    make_deep(task / rng.choice(("tests", "environment", "solution", "steps")), rng.choice((300, 1100)))


def make_deep(folder: Path, depth: int) -> None:
    """Make folders inside each other, relative to each: no path is too long for that."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)


def _toml(task: Path, rng: random.Random) -> None:
    line, path = rng.choice(LINES), task / "task.toml"
    table = line.partition("]")[0] + "]" if line.startswith("[") else ""
    kept = TASK.replace(f"{table}\n", "[other]\n") if table and rng.random() < 0.8 else TASK
    path.write_text(f"{line}\n{kept}" if not table else f"{kept}\n{line}\n")


def _bytes(task: Path, rng: random.Random) -> None:
    path = task / rng.choice(NAMES)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def _dockerfile(task: Path, rng: random.Random) -> None:
    (task / "environment/Dockerfile").write_bytes(rng.choice(DOCKERFILES))


def _compose(task: Path, rng: random.Random) -> None:
    (task / "environment/docker-compose.yaml").write_text(rng.choice(COMPOSE))


def _verifier(task: Path, rng: random.Random) -> None:
    (task / "tests/test.sh").write_bytes(rng.choice(VERIFIERS))


def _number(task: Path, rng: random.Random) -> None:
    line = rng.choice(NUMBER_KEYS)
    table = line.partition("\n")[0]
    kept = TASK.replace(f"{table}\ntimeout_sec = 20.0\n", "").replace(f"{table}\nallow_internet = false\n", "")
    (task / "task.toml").write_text(f"{kept}\n{line} = {rng.choice(NUMBERS)}\n")


def _lfs_pointer(task: Path, rng: random.Random) -> None:
    path = task / rng.choice((*NAMES, "environment/data.bin"))
    path.write_text(POINTER + rng.choice(("", "", "x" * 2000)))


def _special_compose(task: Path, rng: random.Random) -> None:
    path = task / "environment" / rng.choice(("docker-compose.yaml", "docker-compose.yml"))
    make = (os.mkfifo, os.mkdir, lambda at: at.symlink_to("/dev/zero"), lambda at: at.symlink_to(at.name))
    rng.choice(make)(path)


FOLDER_ATTACKS = (
    _links,
    _looping_links,
    _special_file,
    _folder_for_a_file,
    _missing,
    _sparse,
    _odd_name,
    _deep_folders,
    _toml,
    _bytes,
    _dockerfile,
    _compose,
    _verifier,
    _number,
    _lfs_pointer,
    _special_compose,
)


def hostile_folder(root: Path, seed: int) -> str:
    """Write a hostile task below `root` and return its attack's name."""
    rng = random.Random(seed)
    attack = FOLDER_ATTACKS[seed % len(FOLDER_ATTACKS)]
    name = f"{seed:03}-{attack.__name__.strip('_')}"
    if rng.random() < 0.05:
        name = os.fsdecode(rng.choice((b"\xff", b"\x1b[31m", b"a\nb", "\u2028".encode()))) + name
    attack(honest(root / name, f"Make /tmp/answer ({seed})."), rng)
    return attack.__name__


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    return member


def _pack(rng: random.Random, *entries: tarfile.TarInfo) -> bytes:
    raw = b"".join(entry.tobuf() + b"x" * 512 * (entry.size > 0) for entry in entries)
    raw += b"\0" * 1024
    return gzip.compress(raw) if rng.random() < 0.5 else raw


def _names(rng: random.Random) -> bytes:
    names = ("../../outside", "/outside", "a/../../outside", "", ".", "..", "\x00", "a\nb", "n" * 300, "caf\udce9", "~")
    return _pack(rng, *(_entry(rng.choice(names), size=1) for _ in range(rng.randrange(1, 5))))


def _link_chain(rng: random.Random) -> bytes:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE)
    names = ("a", "b", "c", "d/e", "a/x")
    links = (".", "..", "a", "b", "c", "../..", "/etc/passwd", "a/../..", "", "none", "d/../../outside")
    entries = [_entry(rng.choice(names), rng.choice(kinds), rng.choice(links)) for _ in range(rng.randrange(2, 8))]
    return _pack(rng, *entries, _entry("a/outside", size=1), _entry("b/../outside", size=1))


def _hard_link_loop(rng: random.Random) -> bytes:
    names = [f"l{number}" for number in range(rng.choice((2, 3, 2000)))]
    return _pack(
        rng, *(_entry(one, tarfile.LNKTYPE, two) for one, two in zip(names, names[1:] + names[:1], strict=True))
    )


def _deep_entries(rng: random.Random) -> bytes:
    depth = rng.choice((60, 300, 1200, 1900))
    steps = range(1, depth, 1 if rng.random() < 0.5 else depth - 1)
    return _pack(rng, *(_entry("d/" * step, tarfile.DIRTYPE) for step in steps), _entry("d/" * depth + "f", size=1))


def _pax(rng: random.Random) -> bytes:
    values = (
        "5 a=\n",
        "99 path=../outside\n",
        "20 size=-5\n",
        "x path=a\n",
        "13 mtime=nan\n",
        "\xff",
        "12 uid=1e9\n",
        "0 \n",
    )
    text = "".join(rng.choice(values) for _ in range(rng.randrange(1, 4))).encode("latin-1")
    sparse = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n" if rng.random() < 0.4 else b""
    body = sparse + text
    header = _entry("pax", rng.choice((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME)))
    header.size = len(body)
    raw = header.tobuf() + body.ljust(-(-len(body) // 512) * 512, b"\0") + _entry("f", size=1).tobuf() + b"x" * 512
    return raw + b"\0" * 1024


def _kinds(rng: random.Random) -> bytes:
    kinds = [bytes([number]) for number in range(48, 123)]
    return _pack(rng, *(_entry(f"f{number}", rng.choice(kinds), "f0", size=1) for number in range(5)))


def _header_bytes(rng: random.Random) -> bytes:
    raw = bytearray(_pack(random.Random(1), *(_entry(f"f{number}", size=1) for number in range(3))))
    raw = bytearray(gzip.decompress(raw)) if raw[:2] == b"\x1f\x8b" else raw
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(3) * 1024
        raw[at + rng.randrange(345)] = rng.randrange(256)
        fixed = sum(raw[at : at + 512]) - sum(raw[at + 148 : at + 156]) + 8 * 32
        raw[at + 148 : at + 156] = b"%06o\0 " % fixed  # the checksum is right
    return bytes(raw)


def _compressed_bytes(rng: random.Random) -> bytes:
    data = bytearray(_pack(random.Random(3), *(_entry(f"f{number}", size=1) for number in range(9))))
    data = data if data[:2] == b"\x1f\x8b" else bytearray(gzip.compress(data))
    for _ in range(rng.randrange(1, 8)):
        data[rng.randrange(2, len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data) // 2, len(data) + 1)])


def _folder_archive(rng: random.Random) -> bytes:
    """Pack an honest folder under a hostile name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("task.toml", "instruction.md", "tests/test.sh"):
            member = _entry(rng.choice(("./", "", "x/../", "../", "/")) + name, size=4)
            tar.addfile(member, io.BytesIO(b"text"))
    return buffer.getvalue()


ARCHIVE_ATTACKS: tuple[Callable[[random.Random], bytes], ...] = (
    _names,
    _link_chain,
    _hard_link_loop,
    _deep_entries,
    _pax,
    _kinds,
    _header_bytes,
    _compressed_bytes,
    _folder_archive,
    lambda rng: rng.randbytes(rng.choice((0, 1, 512, 5000))),
    lambda rng: b"\x1f\x8b" + rng.randbytes(600),
)


def hostile_archive(seed: int) -> bytes:
    """Return a hostile task archive."""
    return ARCHIVE_ATTACKS[seed % len(ARCHIVE_ATTACKS)](random.Random(seed))


def honest_archive(folder: Path) -> bytes:
    """Return the archive of an honest task, which it writes to `folder` first."""
    return packed(honest(folder))
