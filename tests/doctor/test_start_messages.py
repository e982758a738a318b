"""Messages before the start of a run."""

import pytest

from harbortrainer.commands.launch import start_messages

pytestmark = pytest.mark.process


def test_full_finetuning_prints_a_message(plan):
    (line,) = start_messages(plan(model={"name": "m"}, trainer={"model": {}}))
    assert line == "full fine-tuning of m; to train a LoRA adapter instead, add [trainer.model.lora]"


def test_lora_run_prints_no_message(plan):
    assert list(start_messages(plan(model={"name": "m"}))) == []
