"""One small question to a model's server, so that one that is down, silent or another thing is told in one line.

Contract: `probe` returns when the server gave a chat completion, and raises `UserError` otherwise. It asks for neither
log-probabilities nor token ids: an evaluation needs none.
"""

import asyncio

import httpx
from pydantic import ValidationError

from harbortrainer.errors import UserError

CONNECT_S = 10.0
ANSWER_S = 120.0
"""The longest wait for a one-word answer; a server that is still loading its weights takes its time."""
TOKENS = 64


def probe(base_url: str, model: str, *, key: str, key_var: str, answer_s: float = ANSWER_S) -> None:
    """Ask for one word.

    Args:
        base_url: The server's, with its /v1.
        model: The model's name there.
        key: The key that is sent.
        key_var: The variable that it came from, for the message.
        answer_s: Seconds until a server counts as silent.

    Raises:
        UserError: Nobody answers, or what answers gives no chat completion.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    try:
        reply = asyncio.run(_ask(url, model, key, answer_s))
    except TimeoutError:
        what = f"took the question and gives no whole answer within {answer_s:g} s"
        raise UserError(what, where=url, do="see that the server is up and done with loading") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
        raise UserError(what, where=url, do="start the server, or correct --base-url") from None
    _read(reply, url, model, key_var)


async def _ask(url: str, model: str, key: str, answer_s: float) -> httpx.Response:
    """The reply. The clock is over the whole of it: a server can drip for ever."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say yes."}]}
    waits, headers = httpx.Timeout(None, connect=CONNECT_S), {"Authorization": f"Bearer {key}"}
    async with (
        asyncio.timeout(answer_s),
        httpx.AsyncClient(timeout=waits, trust_env=url.startswith("https:"), headers=headers) as http,
    ):
        reply = await http.post(url, json=body | {"max_tokens": TOKENS})
        if reply.status_code == 400 and "max_tokens" in reply.text:  # newer servers want another name for it
            reply = await http.post(url, json=body)
        return reply


def _read(reply: httpx.Response, url: str, model: str, key_var: str) -> None:
    from harbortrainer.trials.tokens import ChatCompletion

    said = " ".join(reply.text.split())[:200]
    if reply.status_code in (401, 403):
        what = f"refuses the key ({reply.status_code}: {said})"
        raise UserError(what, where=url, do=f"put the right one into ${key_var}, or name another with --api-key-var")
    if reply.status_code == 404:
        do = "correct --model, or --base-url (it ends in /v1)"
        raise UserError(f"knows no {model!r} ({said})", where=url, do=do)
    if not reply.is_success:
        raise UserError(f"answers {reply.status_code}: {said}", where=url, do="mend that and try again")
    try:
        ChatCompletion.model_validate_json(reply.content)
    except ValidationError:
        what = f"answers with what is no chat completion ({said or 'nothing'})"
        raise UserError(what, where=url, do="name the /v1 of an OpenAI-compatible server as --base-url") from None
