"""Whether the doctor knows a chat format that is not the model's, and one that cannot append a turn."""

from pathlib import Path

import pytest
from tiny_model import QWEN3_TOKENS, build_tiny_tokenizer

from harbortrainer.doctor import chat_format
from harbortrainer.doctor.finding import Level

APPENDING = "harbortrainer.environment.appending_template.AppendingTemplate"


@pytest.fixture
def policy(tmp_path):
    """Saves a tokenizer, with more tokens and another template if wanted; the folder."""

    def save(tokens: list[str] | None = None, template: str | None = None) -> str:
        tokenizer = build_tiny_tokenizer()
        tokenizer.add_tokens(tokens or [], special_tokens=True)
        if template is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "policy")
        return str(tmp_path / "policy")

    return save


@pytest.fixture
def found(plan, policy):
    """What is found of a renderer's table for a tokenizer."""

    def find(table: dict[str, str], *of_policy, **more) -> list:
        orchestrator = {"renderer": table} | more
        return list(chat_format.check(plan(model={"name": policy(*of_policy)}, orchestrator=orchestrator)))

    return find


def test_a_format_that_asks_for_tokens_which_the_tokenizer_lacks_is_red(found):
    (finding,) = found({"name": "qwen3"})
    assert finding.level is Level.RED and "<tool_call>" in finding.what and "default" in finding.do
    assert finding.where == "run.toml: orchestrator.renderer.name"


def test_a_tokenizer_that_is_broken_is_red(plan, policy):
    folder = policy()
    (Path(folder) / "tokenizer.json").write_text("{}")
    (finding,) = chat_format.check(plan(model={"name": folder}))
    assert finding.level is Level.RED and f"the tokenizer of {folder} cannot be read" in finding.what
    assert finding.where == "run.toml: model.name"


def test_on_prime_rl_a_tokenizer_may_be_another_or_be_read_by_its_own_code(plan, policy):
    named = {"model": {"name": policy()}, "orchestrator": {"renderer": {"name": "qwen3"}}}
    assert [f.level for f in chat_format.check(plan("prime-rl", **named))] == [Level.RED]
    assert list(chat_format.check(plan("prime-rl", tokenizer={"name": "a/b"}, **named))) == []
    (Path(policy()) / "tokenizer.json").write_text("{}")
    assert list(chat_format.check(plan("prime-rl", **named))) == []


def test_a_template_that_breaks_is_red(found):
    (finding,) = found({"name": "default"}, None, "{{ raise_exception('no system here') }}")
    assert finding.level is Level.RED and "no system here" in finding.what


def test_a_format_that_appends_is_green(found):
    (finding,) = found({"name": "qwen3", "thinking_retention": "all"}, QWEN3_TOKENS)
    assert finding.level is Level.GREEN


def test_thinking_that_is_taken_out_of_the_history_is_told_with_the_setting_that_keeps_it(found):
    (finding,) = found({"name": "qwen3"}, QWEN3_TOKENS)
    assert finding.level is Level.YELLOW and finding.do == 'set thinking_retention = "all" in [orchestrator.renderer]'


def test_a_template_that_renders_all_of_it_is_told_with_the_class_that_appends_to_it(found):
    (finding,) = found({"name": "default"})
    assert finding.level is Level.YELLOW and "turn 50 of 50" in finding.what
    assert finding.do.startswith(f'set name = "custom" and import_path = "{APPENDING}"')
    (finding,) = found({"name": "custom", "import_path": APPENDING})
    assert finding.level is Level.GREEN


def test_a_template_that_nobody_can_append_to_has_no_remedy_but_a_format_of_its_own(found):
    rewrites = "{{ messages | length }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    (finding,) = found({"name": "default"}, None, rewrites)
    assert finding.level is Level.YELLOW and "model's family" in finding.do


def test_a_tokenizer_that_is_not_here_is_not_asked_for(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert list(chat_format.check(plan(model={"name": "a/b"}))) == []
    assert list(chat_format.check(plan(model={"name": str(tmp_path)}))) == []
