"""The base of every table of the run file.

Invariant: a key that is not declared is refused, never dropped, and the sentence under a field is its help text.
"""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
