"""Secrets are recognized by name and by value, and ordinary settings are not taken for secrets."""

import secrets
import string

import pytest

from harbortrainer.config.secret_names import is_secret, is_secret_name, is_secret_value

SECRETS = """
MY_PAT GITHUB_PAT AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID OPENAI_API_KEY_2 OPENAI_KEY2 githubToken apiKey DB_PWD
HF_TOKEN DOCKER_AUTH_CONFIG GOOGLE_APPLICATION_CREDENTIALS MYPASSWORD pat NPM_CREDS SENTRY_DSN SESSION_COOKIE
SSH_PASSPHRASE
"""
ORDINARY = """
MAX_TOKENS NUM_OUTPUT_TOKENS TOKENIZERS_PARALLELISM PATH PWD OLDPWD KEYBOARD MONKEY PATTERN PATIENCE AUTHOR COMPASS HOME
SSH_AUTH_SOCK TOKEN_URL KEY_FILE GIT_AUTHOR_NAME MODE LANG
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_name_of_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY.split())
def test_ordinary_name(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "value",
    [
        "python3.12-slim-bookworm",
        "x86_64-unknown-linux-gnu",
        "postgres://db:5432/app",
        "registry.example.com/team/app:v1.2.3",
        "gpt-4o-mini-2024-07-18",
        "Qwen/Qwen3-8B-Instruct",
        "2024-01-01T00:00:00Z",
        "/nix/store/4yi9q8w7e6r5t4y3/bin:/usr/bin",
        "rs=0:di=01;34:ln=01;36:mh=00:pi=40;33:so=01;35",
        "QuickBrownFoxJumpsOver",
        "en_US.UTF-8",
        "4096",
        "",
    ],
)
def test_ordinary_value(value: str) -> None:
    assert not is_secret_value(value)


@pytest.mark.parametrize(
    "value", ["postgres://me:hunter2@db/app", "-----BEGIN RSA PRIVATE KEY-----", "Bearer abc", "ghp_aaaaaaaaaaaa"]
)
def test_value_of_secret(value: str) -> None:
    assert is_secret("X", value)


def test_most_random_values_are_secrets() -> None:
    letters = string.ascii_letters + string.digits
    made = [
        value
        for _ in range(200)
        for value in (
            secrets.token_hex(16),
            "".join(secrets.choice(letters) for _ in range(24)),
            secrets.token_urlsafe(32),
        )
    ]
    assert sum(map(is_secret_value, made)) > 0.9 * len(made)
