"""The endpoints that verifiers, renderers and Prime-RL's orchestrator call, and their errors."""

import math
import socket
import time
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from sampler_setup import API_KEY, generate, http, logprobs_of, random_prompt
from tiny_model import build_tiny_model

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.http_server import KEY_VARIABLE
from harbortrainer.engines.models import load_tokenizer
from harbortrainer.errors import UserError


@pytest.fixture(scope="module")
def sampler(folder):
    with Sampler(folder, model_name="policy", max_model_len=256) as running:
        yield running


def post(sampler: Sampler, path: str, **body) -> httpx.Response:
    return http.post(sampler.url + path, json=body, timeout=30)


def chat(sampler: Sampler, **body) -> httpx.Response:
    return post(sampler, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})


def test_generate_reply_has_renderers_format(sampler):
    reply = post(
        sampler, "/inference/v1/generate", model="policy", token_ids=[5, 6, 7], cache_salt="3",
        sampling_params={
            "max_tokens": 5, "logprobs": 1, "ignore_eos": True, "stop_token_ids": [], "skip_special_tokens": False,
            "top_k": -1, "min_p": 0.0, "top_p": 1.0, "temperature": 1.0, "return_token_ids": True,
            "routed_experts_prompt_start": 0, "repetition_penalty": 1.0,
        },
    ).json()  # fmt: skip
    (choice,) = reply["choices"]
    assert reply["request_id"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(math.isfinite(p) and p <= 0 for p in logprobs_of(choice))
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize("sent", [None, "Basic YTpi", "Bearer wrong", f"Bearer {API_KEY}x", "Bearer \xe9"])
def test_refuses_requests_without_its_key(sampler, sent):
    headers = [] if sent is None else [(b"Authorization", sent.encode("latin-1"))]
    before = sampler.stats()["requests"]
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/inference/v1/generate")):
        reply = httpx.request(method, sampler.url + path, headers=headers, timeout=30)
        assert (reply.status_code, reply.json()["error"]["message"]) == (401, "wrong or missing API key")
    assert sampler.stats()["requests"] == before


def test_stop_token_ends_completion_and_is_included(sampler):
    stops = list(range(320))
    choice = generate(sampler.url, [5, 6], stop_token_ids=stops)
    assert len(choice["token_ids"]) == 1
    assert choice["finish_reason"] == "stop"


def test_model_eos_token_stops(sampler, folder):
    end = load_tokenizer(folder, where="here").eos_token_id
    for seed in range(8):
        choice = generate(sampler.url, random_prompt(5, seed), seed=seed, max_tokens=100)
        assert end not in choice["token_ids"][:-1]
        assert (choice["finish_reason"] == "stop") == (choice["token_ids"][-1] == end)


def test_n_completions_differ(sampler):
    reply = post(sampler, "/inference/v1/generate", token_ids=[9, 8], sampling_params={"n": 3, "max_tokens": 12})
    choices = reply.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in choices}) == 3


def test_completion_ends_at_context_limit(sampler):
    choice = generate(sampler.url, random_prompt(250, 1), max_tokens=100, ignore_eos=True)
    assert len(choice["token_ids"]) == 6
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"token_ids": [1] * 256}, 400, "This model's maximum context length is 256 tokens"),
        ({"token_ids": []}, 400, "token_ids"),
        ({}, 400, "token_ids"),
        ({"token_ids": ["a"]}, 400, "token_ids.0"),
        ({"token_ids": [320]}, 400, "vocabulary of 320"),
        ({"token_ids": [1], "model": "another"}, 404, "`another` does not exist"),
        ({"token_ids": [1], "stream": True}, 400, "stream"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, 400, "stop"),
        ({"token_ids": [1], "sampling_params": {"presence_penalty": 0.5}}, 400, "presence_penalty"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 7}}, 400, "logprobs = 7 is not supported"),
    ],
)
def test_bad_request_error_names_the_key(sampler, body, status, words):
    reply = post(sampler, "/inference/v1/generate", **body)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_invalid_json_is_a_bad_request(sampler):
    for path in ("/inference/v1/generate", "/v1/chat/completions"):
        assert http.post(sampler.url + path, content=b"{nonsense").status_code == 400


def test_unknown_path_is_404_in_error_format(sampler):
    assert http.get(sampler.url + "/nothing").json()["error"]["code"] == 404


def test_chat_returns_requested_ids(sampler, folder):
    tokenizer = load_tokenizer(folder, where="here")
    reply = chat(sampler, model="policy", max_tokens=10, logprobs=True, return_token_ids=True, seed=1).json()
    (choice,) = reply["choices"]
    rendered: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert reply["prompt_token_ids"] == rendered
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    repeated = generate(sampler.url, rendered, seed=1, max_tokens=10)
    assert repeated["token_ids"] == choice["token_ids"]


def test_chat_omits_unrequested_ids_and_logprobs(sampler):
    reply = chat(sampler, max_completion_tokens=3).json()
    assert "prompt_token_ids" not in reply
    assert "token_ids" not in reply["choices"][0]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] <= 3


def test_chat_template_receives_tools(sampler):
    tools = [{"type": "function", "function": {"name": "shell", "parameters": {}}}]
    plain = chat(sampler, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert chat(sampler, max_tokens=1, tools=tools).json()["usage"]["prompt_tokens"] > plain


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stream": True}, "streaming is not supported"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "This model's maximum context length is 256"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_chat_refuses_unsupported_settings(sampler, body, words):
    reply = chat(sampler, **body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_models_lists_context_length(sampler):
    (card,) = http.get(sampler.url + "/v1/models").json()["data"]
    assert card["id"] == "policy"
    assert card["max_model_len"] == 256


async def test_renderers_client_accepts_the_replies(sampler, folder):
    from renderers import create_renderer
    from renderers.base import load_tokenizer as load_for_rendering
    from renderers.client import OverlongPromptError
    from renderers.client import generate as render_and_generate
    from renderers.configs import DefaultRendererConfig

    renderer = create_renderer(load_for_rendering(str(folder)), DefaultRendererConfig())
    client = AsyncOpenAI(base_url=sampler.url + "/v1", api_key=API_KEY, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
    result = await render_and_generate(
        client=client, renderer=renderer, messages=messages, model="policy",
        sampling_params={"max_tokens": 9, "temperature": 0.8}, extra_headers={"X-Session-ID": "rendered"},
    )  # fmt: skip
    (completion,) = sampler.completion_log.pop("rendered")
    assert list(completion.token_ids) == result["completion_ids"]
    assert list(completion.logprobs) == pytest.approx(result["completion_logprobs"])
    assert completion.prompt_len == len(result["prompt_ids"])
    with pytest.raises(OverlongPromptError):
        await render_and_generate(
            client=client, renderer=renderer, messages=messages, model="policy", prompt_ids=[1] * 257
        )
    with pytest.raises(BadRequestError, match="maximum context length"):
        await render_and_generate(
            client=client, renderer=renderer, messages=messages, model="policy", prompt_ids=[1] * 256
        )


async def test_verifiers_train_client_recognizes_full_context(sampler, folder):
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import ProviderError

    from harbortrainer.environment.verifiers_compat import SamplingConfig

    config = TrainClientConfig(
        base_url=sampler.url + "/v1", api_key_var=KEY_VARIABLE, renderer=DefaultRendererConfig(),
        renderer_model_name=str(folder),
    )  # fmt: skip
    client = TrainClient(config)
    sampling = SamplingConfig(temperature=1.0, max_tokens=7, extra_body={"top_k": -1, "min_p": 0.0})
    body = {"model": "policy", "messages": [{"role": "user", "content": "the lazy dog"}]}
    try:
        response = await client.get_response(ChatDialect(), body, sampling, session_id="trace-1")
        (completion,) = sampler.completion_log.pop("trace-1")
        assert response.tokens is not None
        assert list(completion.token_ids) == response.tokens.completion_ids
        assert list(completion.logprobs) == pytest.approx(response.tokens.completion_logprobs)
        body["messages"][0]["content"] = "word " * 400
        with pytest.raises(ProviderError, match="maximum context length") as refused:
            await client.get_response(ChatDialect(), body, sampling, session_id="trace-2")
        assert refused.value.status_code == 400
    finally:
        await client.close()


def test_disconnected_client_frees_its_slot(sampler):
    body = {"token_ids": random_prompt(8, 1), "sampling_params": {"max_tokens": 240, "ignore_eos": True, "n": 20}}
    before = sampler.stats()
    with pytest.raises(httpx.ReadTimeout):
        http.post(sampler.url + "/inference/v1/generate", json=body, timeout=httpx.Timeout(5, read=0.05))
    ended, deadline, after = 0, time.monotonic() + 60, before
    # A request counts as cancelled before the engine thread removes it from the cache.
    while (ended < 20 or after["cache_used_tokens"]) and time.monotonic() < deadline:
        time.sleep(0.01)
        after = sampler.stats()
        ended = after["cancelled"] + after["requests"] - before["cancelled"] - before["requests"]
    assert ended == 20
    assert after["cancelled"] > before["cancelled"]
    assert after["running"] == after["cache_used_tokens"] == 0
    assert generate(sampler.url, [5])["token_ids"]


def test_client_that_leaves_while_it_sends_is_no_error(sampler, caplog):
    address = ("127.0.0.1", int(sampler.url.rsplit(":", 1)[1]))
    for path in ("/inference/v1/generate", "/v1/chat/completions"):
        with socket.create_connection(address) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: 100\r\n\r\n"
            client.sendall(head.encode() + b"{")
            time.sleep(0.2)  # until the server waits for the rest
    time.sleep(0.5)
    assert http.get(f"{sampler.url}/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_port_in_use_is_one_line_error(sampler, folder):
    port = int(sampler.url.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"port {port} is in use"):
        Sampler(folder, port=port)


def test_folder_without_weights_error_names_missing_files(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights here") as caught:
        Sampler(folder)
    assert str(folder) in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json here"):
        Sampler(tmp_path / "empty")


def test_truncated_weights_are_one_line_error(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        Sampler(folder)


def test_refuses_context_beyond_model_positions(folder):
    with pytest.raises(UserError, match="more than the model's 2048 positions"):
        Sampler(folder, max_model_len=4096)


@pytest.mark.parametrize(("key", "value"), [("device", "quantum"), ("dtype", "int8"), ("dtype", "nonsense")])
def test_refuses_unknown_device_or_dtype(folder, key, value):
    with pytest.raises(UserError, match=f"unknown {key}"):
        Sampler(folder, **{key: value})
