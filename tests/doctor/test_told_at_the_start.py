"""What a launch says before it begins, so that a table which was forgotten is not found out by its weights."""

from harbortrainer.commands.launch import told


def test_a_run_without_an_adapter_says_that_it_trains_every_weight(plan):
    (line,) = told(plan(model={"name": "m"}, trainer={"model": {}}))
    assert line == "every weight of m is trained; for an adapter alone, add [trainer.model.lora]"


def test_a_run_with_an_adapter_says_nothing_of_it(plan):
    assert list(told(plan(model={"name": "m"}))) == []
