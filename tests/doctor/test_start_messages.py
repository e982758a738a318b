"""Messages before the start of a run."""

import pytest

from harbortrainer.commands.launch import next_commands, start_messages

pytestmark = pytest.mark.process


def test_full_finetuning_prints_a_message(plan):
    (line,) = start_messages(plan(model={"name": "m"}, trainer={"model": {}}))
    assert line == "full fine-tuning of m; to train a LoRA adapter instead, add [trainer.model.lora]"


def test_lora_run_prints_no_message(plan):
    assert list(start_messages(plan(model={"name": "m"}))) == []


@pytest.mark.parametrize(
    ("taskset", "expected"),
    [({}, "harbortrainer eval held --model "), ({"split": "eval"}, "harbortrainer eval TASKS --model ")],
)
def test_next_commands_are_those_of_the_run(plan, taskset, expected):
    held_out = {"env": {"taskset": {"id": "harbor_env", "tasks_dir": "held"} | taskset}}
    run = plan(orchestrator={"eval": {"source": [held_out]}}, output_dir="out", run={"name": "my run"})
    view, evaluation, export = (command for command, _ in next_commands(run))
    assert (view, export) == ("harbortrainer view 'out/my run'", "harbortrainer export 'out/my run'")
    assert evaluation == f"{expected}'out/my run'"
