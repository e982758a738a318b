"""Old spellings of Prime-RL, translated to today's on load, and in the file by `harbortrainer config upgrade`.

Contract: `upgrade` changes nothing but what it names; comments stay. What has no translation that surely means the
same is refused with what to do (`GONE`).
"""

import tomlkit
from tomlkit.exceptions import TOMLKitError

from harbortrainer.config import legacy_env
from harbortrainer.config.fates import longest
from harbortrainer.config.sections import Sections, is_toml, sections
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
        The new text, and one line that says what was translated; none when nothing was old, or the text is not TOML.

    Raises:
        UserError: An old spelling that cannot be translated.
    """
    try:
        run = sections(text)
    except TOMLKitError:
        return text, []
    if joined := not is_toml(text):
        run.join_inline_tables()
        if not is_toml(run.text):
            return text, []
    said = [*_translate_keys(run), *_translate_tables(run), *_translate_gpus(run, file)]
    if not is_toml(run.text):
        raise UserError(f"a key in both spellings ({', '.join(said)})", where=file, do="keep one of the two")
    said += legacy_env.translate(run, file)
    if said:
        _refuse_gone(run, file)
        told = f"old spelling translated: {', '.join(said)}; `harbortrainer config upgrade {file}` writes it"
        return run.text, [told]
    return (run.text, ["an inline table over several lines was read as TOML 1.1"]) if joined else (text, [])


def _translate_keys(run: Sections) -> list[str]:
    said = []
    for section in run:
        for path, line in section.pairs():
            if path in KEYS:
                line.key = line.key[: line.key.rfind(".") + 1] + KEYS[path]
                said.append(f"{path} -> {KEYS[path]}")
    return said


def _translate_tables(run: Sections) -> list[str]:
    said = []
    for old, new in TABLES.items():
        inside = [section for section in run if f"{section.table}.".startswith(f"{old}.")]
        for section in inside:
            run.move(section, new + section.table.removeprefix(old))
        if inside:
            said.append(f"[{old}] -> [{new}]")
    return said


def _translate_gpus(run: Sections, file: str) -> list[str]:
    said = []
    for old, new in GPUS.items():
        for line in [line for line in run[0].lines if line.key == old]:
            devices = line.item.unwrap()
            if not isinstance(devices, list):
                raise UserError("must be a list of devices", where=f"{file}: {old}", do="change the value")
            count = len(devices)
            run[0].lines.remove(line)
            line.key = new
            line.hold(tomlkit.item(count))
            run.at("deployment").put(line)
            said.append(f"{old} -> deployment.{new} = {count}")
    return said


def _refuse_gone(run: Sections, file: str) -> None:
    paths = [path for section in run for path in (section.table, *(path for path, _ in section.pairs()))]
    for path in paths:
        if gone := longest(path, GONE):
            raise UserError("this setting is gone", where=f"{file}: {path}", do=GONE[gone])
