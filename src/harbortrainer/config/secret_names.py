"""Recognition of secrets among environment variables: by the words of the name, and by the randomness of the value.

Invariant: a miss in the name is not the end. `MY_VALUE=ghp_x7Kq...` is a secret because its value is random, and
`DB_PIN_PASS=abc` because of its name. Paths, versions, host names and plain numbers are no secrets.
"""

import math
import re
from collections import Counter

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORDS = {"KEY", "KEYS", "PAT", "PASS", "PWD", "PW", "AUTH", "AUTHORIZATION", "COOKIE", "JWT", "BEARER", "DSN", "CREDS"}
_ENDS = ("TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "APIKEY", "ACCESSKEY")
_ENDS += ("PRIVATEKEY", "SECRETKEY", "CREDENTIAL", "CREDENTIALS")
_QUANTITIES = {"MAX", "MIN", "NUM", "TOTAL", "OUTPUT", "INPUT", "CONTEXT", "THINKING", "BUDGET"}
"""`MAX_TOKENS` is a number."""
_ABOUT = {
    "FILE",
    "PATH",
    "DIR",
    "ENV",
    "VAR",
    "NAME",
    "URL",
    "TTL",
    "LENGTH",
    "LIMIT",
    "COUNT",
    "SOCK",
    "TYPE",
    "FORCE",
}
"""A name that has one of these describes a secret, or says where it is."""

_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_MARKED = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|^(?:Bearer|Basic) |^(?:sk|pk|ghp|gho|hf|xox[a-z])[-_]\w{8}")
_PIECE = re.compile(r"[A-Za-z0-9]{16,}")
_CLASSES = re.compile(r"[A-Z]+[a-z]*|[a-z]+|[0-9]+")
_MIN_BITS = 2.8
"""Shannon entropy in bits per character; 20 random hexadecimal digits have about 3.3."""
_MIN_CHANGES = 0.2
"""Changes between words and digits per character; names and versions have fewer."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether an environment variable holds a secret, as far as its name and its value show.

    Args:
        name: Name of the variable.
        value: Its value; "" if it is unknown.

    Example:
        >>> is_secret("GITHUB_PAT"), is_secret("MAX_TOKENS", "4096"), is_secret("X", "x7Kq2Lp9Zt4Wb8Rd")
        (True, False, True)
    """
    return is_secret_name(name) or is_secret_value(value)


def is_secret_name(name: str) -> bool:
    """Return whether the words of a name, such as `OPENAI_API_KEY_2` or `githubPat`, name a secret."""
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words == ["PWD"] or words[-1] in _ABOUT or _ABOUT & {words[0]}:
        return False
    if words[-1] == "TOKENS" and _QUANTITIES & set(words):
        return False
    return any(word in _WORDS or word.endswith(_ENDS) for word in words)


def is_secret_value(value: str) -> bool:
    """Return whether a value is random, has a well-known prefix, or is a URL with a password."""
    if _URL_PASSWORD.search(value) or _MARKED.search(value):
        return True
    if value.startswith(("/", "~", ".")) or "://" in value:
        return False
    return any(_is_random(piece) for piece in _PIECE.findall(value))


def _is_random(text: str) -> bool:
    size = len(text)
    bits = -sum(count / size * math.log2(count / size) for count in Counter(text).values())
    return bits >= _MIN_BITS and (len(_CLASSES.findall(text)) - 1) / size >= _MIN_CHANGES
