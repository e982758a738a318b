"""Findings on chat formats that do not match the model or cannot append a turn."""

from pathlib import Path

import pytest
from tiny_model import QWEN3_TOKENS, build_tiny_tokenizer

from harbortrainer.doctor import policy_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.errors import UserError

APPENDING = "harbortrainer.environment.appending_template.AppendingTemplate"


@pytest.fixture
def policy(tmp_path):
    """Save a tokenizer, optionally with more tokens and another template; returns its folder."""

    def save(tokens: list[str] | None = None, template: str | None = None) -> str:
        tokenizer = build_tiny_tokenizer()
        tokenizer.add_tokens(tokens or [], special_tokens=True)
        if template is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "policy")
        return str(tmp_path / "policy")

    return save


@pytest.fixture
def check(plan, policy):
    """Return a function that checks a renderer table with a tokenizer."""

    def check_table(table: dict[str, str], *policy_arguments, **more) -> list:
        orchestrator = {"renderer": table} | more
        return list(
            policy_checks.check_chat_format(plan(model={"name": policy(*policy_arguments)}, orchestrator=orchestrator))
        )

    return check_table


def test_chat_format_with_missing_tokens_is_red(check):
    (finding,) = check({"name": "qwen3"})
    assert finding.level is Level.RED and "<tool_call>" in finding.what and "default" in finding.do
    assert finding.where == "run.toml: orchestrator.renderer.name"


def test_broken_tokenizer_is_red(plan, policy):
    folder = policy()
    (Path(folder) / "tokenizer.json").write_text("{}")
    (finding,) = policy_checks.check_chat_format(plan(model={"name": folder}))
    assert finding.level is Level.RED and f"the tokenizer of {folder} cannot be read" in finding.what
    assert finding.where == "run.toml: model.name"


def test_prime_rl_may_use_another_tokenizer_or_remote_code(plan, policy):
    named = {"model": {"name": policy()}, "orchestrator": {"renderer": {"name": "qwen3"}}}
    assert [f.level for f in policy_checks.check_chat_format(plan("prime-rl", **named))] == [Level.RED]
    assert list(policy_checks.check_chat_format(plan("prime-rl", tokenizer={"name": "a/b"}, **named))) == []
    (Path(policy()) / "tokenizer.json").write_text("{}")
    assert list(policy_checks.check_chat_format(plan("prime-rl", **named))) == []


def test_failing_template_is_red(check):
    (finding,) = check({"name": "default"}, None, "{{ raise_exception('no system here') }}")
    assert finding.level is Level.RED and "no system here" in finding.what


def test_appending_format_is_green(check):
    (finding,) = check({"name": "qwen3", "thinking_retention": "all"}, QWEN3_TOKENS)
    assert finding.level is Level.GREEN


def test_dropped_thinking_proposes_thinking_retention(check):
    (finding,) = check({"name": "qwen3"}, QWEN3_TOKENS)
    assert finding.level is Level.YELLOW and finding.do == 'set thinking_retention = "all" in [orchestrator.renderer]'


def test_rerendering_template_proposes_appending_template(check):
    (finding,) = check({"name": "default"})
    assert finding.level is Level.YELLOW and "turn 50 of 50" in finding.what
    assert finding.do.startswith(f'set name = "custom" and import_path = "{APPENDING}"')
    (finding,) = check({"name": "custom", "import_path": APPENDING})
    assert finding.level is Level.GREEN


def test_auto_appends_turns_of_an_unknown_models_template(check):
    (finding,) = check({"name": "auto"})
    assert finding.level is Level.GREEN and finding.what.startswith("'auto' works")
    (finding,) = check({"name": "auto"}, None, "{{ raise_exception('no system here') }}")
    assert finding.level is Level.RED and "'auto' does not work" in finding.what


def test_rewriting_template_proposes_another_format(check):
    rewrites = "{{ messages | length }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    (finding,) = check({"name": "default"}, None, rewrites)
    assert finding.level is Level.YELLOW and "model's family" in finding.do


def test_missing_tokenizer_is_not_downloaded(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert list(policy_checks.check_chat_format(plan(model={"name": "a/b"}))) == []
    assert list(policy_checks.check_chat_format(plan(model={"name": str(tmp_path)}))) == []


QWEN3_LIKE = (
    "{%- for m in messages %}{%- set c = m.content.split('</think>')[-1].lstrip('\\n') if loop.index0 < "
    "messages|length - 1 else m.content %}{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""It drops the thinking of earlier turns, as Qwen3's template does."""


def test_chosen_format_is_the_models_own_and_appends(policy):
    own = policy_checks.choose_chat_format(policy())
    assert own.table == {"name": "custom", "import_path": APPENDING}
    assert policy_checks.choose_chat_format("Qwen/Qwen3-8B").table == {"name": "qwen3", "thinking_retention": "all"}


def test_family_is_chosen_if_it_renders_as_the_template(policy):
    folder = policy(QWEN3_TOKENS, QWEN3_LIKE)
    (Path(folder) / "config.json").write_text('{"model_type": "qwen3"}')
    assert policy_checks.choose_chat_format(folder).table == {"name": "qwen3", "thinking_retention": "all"}
    folder = policy(QWEN3_TOKENS, QWEN3_LIKE.replace("user", "person").replace("assistant", "model"))
    assert policy_checks.choose_chat_format(folder).table == {"name": "default"}


def test_model_without_a_chat_template_is_refused(policy):
    with pytest.raises(UserError, match="has no chat template; use an instruction-tuned model"):
        policy_checks.choose_chat_format(policy(None, ""))
