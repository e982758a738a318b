"""The base of every table of the run file.

Invariant: a key that is not declared is refused, never dropped, and the sentence under a field is its help text.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Table(BaseModel):
    """A table of the run file; `"None"` means null, since TOML has none (as in Prime-RL)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: None if value == "None" else value for key, value in data.items()}
