"""The text of single tokens, by the tokenizer of the run's model, where its file is on this machine.

Contract: nothing is fetched and no model is loaded: `tokenizer.json` is read by the tokenizers library alone. Without
one a token is shown by its number.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class TokenPieces:
    """Decodes one token at a time.

    Args:
        file: A `tokenizer.json`; None when there is none here.
    """

    def __init__(self, file: Path | None) -> None:
        self._tokenizer = _tokenizer(file) if file is not None else None

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """[T] what each token says by itself; a part of a character is shown as a box."""
        if self._tokenizer is None:
            return [f"{token}·" for token in token_ids]
        return self._tokenizer.decode_batch([[token] for token in token_ids], skip_special_tokens=False)


def tokenizer_file(*models: str) -> Path | None:
    """The tokenizer of the first of these models (folders, hub ids) that has one on this machine."""
    places = (place for name in models if name for place in (Path(name) / FILE, *_cached(name)))
    return next((path for path in places if path.is_file()), None)


def _cached(name: str) -> list[Path]:
    """Where the hub's client keeps the file of a model, the newest first."""
    if name.count("/") != 1:
        return []
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/{FILE}")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


@lru_cache(maxsize=2)
def _tokenizer(file: Path) -> "Tokenizer | None":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001  (what the library raises for a broken file is a bare Exception)
        return None
