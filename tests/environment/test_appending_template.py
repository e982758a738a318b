"""Appended turns equal the template's own rendering; uncertain cases are rendered whole."""

import pytest
from renderers import CustomRendererConfig, create_renderer
from renderers.base import Message
from tiny_model import CHAT_TEMPLATE, build_tiny_tokenizer

from harbortrainer.environment.appending_template import AppendingTemplate

PATH = "harbortrainer.environment.appending_template.AppendingTemplate"
USER = "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TRIMS = CHAT_TEMPLATE.replace("(message.content or '')", "(message.content or '') | trim")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE


def each(before: str) -> str:
    """A template that puts something before each message."""
    return "{% for message in messages %}" + before + USER + "{% endfor %}" + OPENING


ODD = {
    "takes the thoughts out of what was said": CHAT_TEMPLATE.replace(
        "(message.content or '')", "(message.content or '').split('</think>')[-1]"
    ),
    "numbers the messages": each("{{ loop.index }}"),
    "writes the last question otherwise": each("{% if loop.last %}Now: {% endif %}"),
    "tells how long the talk is": "{{ messages | length }}" + each(""),
    "ends no answer": "{% for message in messages %}{{ message.role ~ ': ' ~ message.content ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}
TALK = [("ls\n", "a b\n\n"), ('{"commands": []}', "  "), ("<think>\nwell\n</think>\n\ndone", "sure? "), ("yes", "")]


def renderer(template: str) -> AppendingTemplate:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    made = create_renderer(tokenizer, CustomRendererConfig(import_path=PATH))
    assert isinstance(made, AppendingTemplate)
    return made


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def sampled(made: AppendingTemplate, text: str) -> list[int]:
    return made._tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "be\nbrief"}]])
def test_appended_turns_equal_rendered_history(first):
    made = renderer(CHAT_TEMPLATE)
    messages: list[Message] = [*first, user("begin")]
    prompt = made.render_ids(messages, add_generation_prompt=True)
    for answer, question in TALK:
        found = made.bridge_to_next_turn(prompt, sampled(made, f"{answer}<|im_end|>"), [user(question)])
        turn: list[Message] = [{"role": "assistant", "content": answer}, user(question)]
        messages += turn
        assert found is not None
        assert found.token_ids == made.render_ids(messages, add_generation_prompt=True)
        prompt = found.token_ids


def test_added_tokens_belong_to_question_except_answer_header():
    made = renderer(CHAT_TEMPLATE)
    prompt = made.render_ids([user("begin")], add_generation_prompt=True)
    found = made.bridge_to_next_turn(prompt, sampled(made, "ls<|im_end|>"), [user("a b")])
    assert found is not None and found.message_roles == ["user"]
    own = [token for token, owner in zip(found.token_ids, found.message_indices, strict=True) if owner == 0]
    assert made._tokenizer.decode(own) == "\n<|im_start|>user\na b<|im_end|>\n"


@pytest.mark.parametrize("template", [TRIMS, NO_SYSTEM])
def test_sampled_tokens_stay_even_if_template_trims_them(template):
    made = renderer(template)
    prompt = made.render_ids([user("begin")], add_generation_prompt=True)
    said = sampled(made, " ls \n\n<|im_end|>")
    found = made.bridge_to_next_turn(prompt, said, [user("a b")])
    assert found is not None and found.token_ids[: len(prompt) + len(said)] == prompt + said


@pytest.mark.parametrize("template", ODD.values(), ids=ODD)
def test_position_dependent_template_renders_whole_history(template):
    made = renderer(template)
    prompt = made.render_ids([user("begin")], add_generation_prompt=True)
    assert not made.appends
    assert made.bridge_to_next_turn(prompt, sampled(made, "ls<|im_end|>"), [user("a b")]) is None


@pytest.mark.parametrize(
    ("answer", "messages", "tools"),
    [
        ("cut", [user("go on")], None),
        ("", [user("go on")], None),
        ("ls<|im_end|>", [{"role": "tool", "content": "a b"}], None),
        ("ls<|im_end|>", [user("one"), user("two")], None),
        ("ls<|im_end|>", [user("one")], [{"name": "shell", "description": "", "parameters": {}}]),
    ],
)
def test_uncertain_cases_render_history_again(answer, messages, tools):
    made = renderer(CHAT_TEMPLATE)
    prompt = made.render_ids([user("begin")], add_generation_prompt=True)
    assert made.bridge_to_next_turn(prompt, sampled(made, answer), messages, tools=tools) is None
