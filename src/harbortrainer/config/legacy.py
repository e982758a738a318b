"""Old spellings of Prime-RL, translated to today's on load, and in the file by `harbortrainer config upgrade`.

Contract: `upgrade` changes nothing but what it names; comments stay. What has no translation that surely means the
same is refused with what to do (`GONE`).
"""

import shutil
import tomllib
from pathlib import Path

from harbortrainer.config import legacy_env
from harbortrainer.config.document import Document
from harbortrainer.config.toml_lines import Statement
from harbortrainer.errors import UserError

TABLES = {
    "wandb": "monitors.wandb",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "trainer.model.experimental.lora": "trainer.model.lora",
    "trainer.experimental.lora": "trainer.model.lora",
    "inference.model": "inference.vllm",
    "inference.parallel": "inference.vllm",
}
KEYS = {
    "ckpt.keep": "keep_last",
    "inference.model.name": "model",
    "inference.parallel.dp": "data_parallel_size",
    "inference.parallel.tp": "tensor_parallel_size",
    "orchestrator.eval.rollouts_per_example": "group_size",
    "orchestrator.eval.sampling.max_tokens": "max_completion_tokens",
    "orchestrator.rollouts_per_example": "group_size",
    "orchestrator.sampling.max_tokens": "max_completion_tokens",
    "orchestrator.train.sampling.max_tokens": "max_completion_tokens",
}
GPUS = {"inference_gpu_ids": "num_infer_gpus", "trainer_gpu_ids": "num_train_gpus"}
GONE = {
    "async_level": "remove it and set orchestrator.max_off_policy_steps",
    "max_async_level": "remove it and set orchestrator.max_off_policy_steps",
    "orchestrator.async_level": "remove it and set orchestrator.max_off_policy_steps",
    "orchestrator.max_async_level": "remove it and set orchestrator.max_off_policy_steps",
    "orchestrator.buffer": "remove it; [orchestrator.train.source.curriculum] chooses tasks today",
    "orchestrator.env_mix": "remove it and give each source its ratio",
    "orchestrator.oversampling_factor": "remove it; [orchestrator.concurrency] bounds the trials in flight",
    "orchestrator.trajectory_strategy": "remove it; samples are joined wherever the history allows it",
}


def upgrade(text: str, file: str) -> tuple[str, list[str]]:
    """A run file in today's spelling.

    Args:
        text: The file's text.
        file: Its name, for errors.

    Returns:
        The new text, and one line for each thing that was translated; none when nothing was old.

    Raises:
        UserError: An old spelling that cannot be translated.
    """
    document = Document(text)
    if not _is_toml(document) and not (document.join_inline_tables() and _is_toml(document)):
        return text, []
    said = [*_translate_keys(document), *_translate_tables(document), *_translate_gpus(document)]
    said += _translate_environments(document, file)
    if not said:
        return (
            (document.text, ["an inline table over several lines was read as TOML 1.1"])
            if document.text != text
            else (text, [])
        )
    _refuse_gone(document, file)
    return document.text, [
        f"old spelling translated: {', '.join(said)}; `harbortrainer config upgrade {file}` writes it"
    ]


def upgrade_file(file: Path, output: Path | None) -> list[str]:
    """Write a run file in today's spelling; in place, the old one is kept beside it as `FILE.old`.

    Returns:
        What was done, a line each.

    Raises:
        UserError: No such file, not TOML, or an old spelling that cannot be translated.
    """
    from harbortrainer.config.reader import check_known, read

    raw = read(file)
    check_known(raw.data, str(file))
    if raw.upgraded is None:
        return [f"{file}: nothing to do, this is today's spelling"]
    if output is None:
        shutil.copy2(file, file.with_name(f"{file.name}.old"))
    (output or file).write_text(raw.upgraded, encoding="utf-8")
    return [raw.notes[0].split(";")[0], f"written to {output or file}"]


def _is_toml(document: Document) -> bool:
    try:
        document.data()
    except tomllib.TOMLDecodeError:
        return False
    return True


def _translate_keys(document: Document) -> list[str]:
    said = []
    for statement in list(document.statements):
        if statement.kind == "pair" and statement.path in KEYS:
            document.rename_key(statement.table, statement.key, KEYS[statement.path])
            said.append(f"{statement.path} -> {KEYS[statement.path]}")
    return said


def _translate_tables(document: Document) -> list[str]:
    said = []
    for old, new in TABLES.items():
        if any(_in(statement, old) for statement in document.statements):
            document.rename_table(old, new)
            said.append(f"[{old}] -> [{new}]")
    return said


def _in(statement: Statement, table: str) -> bool:
    return statement.kind in ("table", "array") and (statement.table + ".").startswith(f"{table}.")


def _translate_gpus(document: Document) -> list[str]:
    said = []
    for old, new in GPUS.items():
        if document.has(old):
            ids = document.data()[old]
            comment = document.pop(old)
            document.put("deployment", new, len(ids), comment)
            said.append(f"{old} -> deployment.{new} = {len(ids)}")
    return said


def _translate_environments(document: Document, file: str) -> list[str]:
    orchestrator = document.data().get("orchestrator", {})
    said, args = [], []
    if "env" in orchestrator:
        args += legacy_env.translate(document, "train", file)
        said.append("[[orchestrator.env]] -> [[orchestrator.train.source]]")
    if "env" in orchestrator.get("eval", {}):
        args += legacy_env.translate(document, "eval", file)
        said.append("[[orchestrator.eval.env]] -> [[orchestrator.eval.source]]")
    legacy_env.spread(document, args, file)
    return said


def _refuse_gone(document: Document, file: str) -> None:
    for statement in document.statements:
        for key, do in GONE.items():
            if statement.path == key or statement.path.startswith(f"{key}."):
                raise UserError("this setting is gone", where=f"{file}: {statement.path}", do=do)
