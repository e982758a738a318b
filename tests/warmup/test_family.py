"""The quickstart's family: its script reproduces the repository's tasks, and no held-out task is learned."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from ordinary_user import run_on_image

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.warmup.warmup import load_task_generator
from make_tasks import OPERATIONS, content, dockerfile, variants
from tiny_policy.variants import heldout_keys, instruction_key, learnable

QUICKSTART = Path(__file__).parents[2] / "datasets/quickstart"
SCRIPT = QUICKSTART / "make_tasks.py"


def _files(folder: Path) -> dict[str, str]:
    found = [path for split in ("train", "heldout") for path in (folder / split).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_script_reproduces_repository_tasks(tmp_path: Path):
    subprocess.run([sys.executable, "-B", SCRIPT, tmp_path], check=True)
    assert _files(tmp_path) == _files(QUICKSTART)


def test_quickstart_has_8_training_and_32_held_out_tasks():
    assert len(list((QUICKSTART / "train").iterdir())) == 8
    assert len(list((QUICKSTART / "heldout").iterdir())) == 32


def test_quickstart_tasks_share_one_dockerfile():
    assert len({path.read_text() for path in QUICKSTART.glob("*/*/environment/Dockerfile")}) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user here")
def test_an_ordinary_user_has_the_files_and_the_plain_prompt_on_the_hosts_root():
    asked = ("cat /app/apple.txt", "bash --login -i -c 'echo prompt: \"[$PS1]\"' 2>/dev/null")
    files, prompt, *_ = run_on_image(dockerfile(), *asked, IMAGE="host")
    assert files == " ".join(content()["apple"]) and prompt == "prompt: [$ ]"


def test_file_operations_have_distinct_results():
    operations = [list, *(operation.result for operation in OPERATIONS)]
    results = [tuple(do(lines)) for do in operations for lines in content().values()]
    assert len(results) == len(set(results))


def test_mistakes_differ_from_solution():
    rng = random.Random(0)
    assert all(variant.mistake(rng) != variant.commands for variant in variants())


def test_held_out_tasks_are_not_learned():
    heldout = {path.parent.name for path in (QUICKSTART / "heldout").glob("*/instruction.md")}
    learned = learnable(variants(), QUICKSTART / "heldout")
    assert heldout.isdisjoint(variant.name for variant in learned)
    assert {instruction_key(v.instruction) for v in learned}.isdisjoint(heldout_keys(QUICKSTART / "heldout"))
    assert len(learned) == 8 * 8 * 8 - 32


def test_refuses_held_out_folder_without_tasks(tmp_path: Path):
    with pytest.raises(UserError, match="no tasks here"):
        learnable(variants(), tmp_path)


def test_refuses_missing_family_file(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        load_task_generator(tmp_path / "family.py")


def test_refuses_file_without_make_policy(tmp_path: Path):
    (tmp_path / "family.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="make_policy"):
        load_task_generator(tmp_path / "family.py")


def test_family_file_imports_neighbouring_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "what_lies_beside.py").write_text("ANSWER = 42\n")
    (tmp_path / "family.py").write_text(
        "def make_policy(config, folder, *, seed, display):\n"
        "    import what_lies_beside\n"
        "    (folder / 'answer').write_text(str(what_lies_beside.ANSWER))\n"
    )
    config, display = WarmupConfig(family=tmp_path / "family.py"), Display()
    load_task_generator(tmp_path / "family.py").make_policy(config, tmp_path, seed=0, display=display)
    assert (tmp_path / "answer").read_text() == "42"
