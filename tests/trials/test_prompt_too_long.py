"""Messages of common servers for a prompt that is too long, and other refusals."""

import pytest

from harbortrainer.trials.model_calls import is_prompt_too_long

TOO_LONG = {
    "vLLM": "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens.",
    "vLLM's engine": "The decoder prompt (length 5951) is longer than the maximum model length of 4096.",
    "vLLM's engine, with an answer": (
        "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1) "
        "is longer than the maximum model length of 2048."
    ),
    "older vLLM": "max_tokens must be at least 1, got -904.",
    "SGLang": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "SGLang's scheduler": "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens).",
    "SGLang, with an answer": "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    "llama.cpp": "the request exceeds the available context size, try increasing it",
    "TGI": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "OpenAI's code": '{"error": {"code": "context_length_exceeded"}}',
    "OpenAI's Responses": "Your input exceeds the context window of this model.",
    "OpenAI's newer chat": "Input tokens exceed the configured limit of 272000 tokens.",
    "Anthropic": "prompt is too long: 210000 tokens > 200000 maximum",
    "Gemini": "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    "xAI": "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
    "verifiers' renderers": "Prompt length (5000) exceeds maximum context length (4096)",
}
OTHER = {
    "a setting": "max_tokens must be at least 1, got 0.",
    "a field": "The field `user` exceeds the maximum allowed length of 64 characters.",
    "a name": "The model `policy` does not exist.",
    "a rate": "Rate limit reached for requests: limit 100000 tokens per minute.",
    "a batch": "max_num_batched_tokens is smaller than max_model_len",
}


@pytest.mark.parametrize("server", TOO_LONG)
def test_recognizes_prompt_too_long_messages(server):
    assert is_prompt_too_long(TOO_LONG[server])


@pytest.mark.parametrize("case", OTHER)
def test_other_refusals_are_not_prompt_too_long(case):
    assert not is_prompt_too_long(OTHER[case])
