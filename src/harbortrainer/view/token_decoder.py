"""Text of single tokens, decoded with the tokenizer of the run's model.

Contract: nothing is downloaded and no model is loaded; only the tokenizers library reads a local `tokenizer.json`.
Without that file, a token is shown as its id.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class TokenDecoder:
    """Decoder of single tokens.

    Args:
        file: A `tokenizer.json`; None if the machine has none.
    """

    def __init__(self, file: Path | None) -> None:
        self._tokenizer = _tokenizer(file) if file is not None else None

    @property
    def known(self) -> bool:
        """Whether a tokenizer was loaded."""
        return self._tokenizer is not None

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each of [T] tokens; a partial character becomes a replacement character."""
        if self._tokenizer is None:
            return [f"{token}·" for token in token_ids]
        return self._tokenizer.decode_batch([[token] for token in token_ids], skip_special_tokens=False)


def tokenizer_file(*models: str) -> Path | None:
    """Return the local `tokenizer.json` of the first of these models (folders or hub ids) that has one."""
    paths = (path for name in models if name for path in (Path(name) / FILE, *_cached(name)))
    return next((path for path in paths if path.is_file()), None)


def _cached(name: str) -> list[Path]:
    """Return the paths of a model's file in the Hugging Face cache, newest first."""
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
    except Exception:  # noqa: BLE001  (the library raises a bare Exception for a broken file)
        return None
