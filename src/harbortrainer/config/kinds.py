"""What a value may be, by the annotation of its field: the kinds that a key of the run file takes, and the tables.

Contract: the kinds are `bool`, `int`, `float`, `str`, `list`, `table` and `none`; a union has those of its members, and
`any` stands for an annotation that says nothing.
"""

import types
import typing
from collections.abc import Iterable

from pydantic import BaseModel

NUMBERS = frozenset({"int", "float", "none"})


def kinds(annotation: object) -> frozenset[str]:
    """The kinds of value that a field with this annotation takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.TypeAliasType):
        return kinds(annotation.__value__)
    if origin is typing.Annotated:
        return kinds(arguments[0])
    if origin is typing.Literal:
        return _join(kinds(type(value)) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return _join(kinds(part) for part in arguments)
    kind = origin if isinstance(origin, type) else annotation
    return frozenset({_of(kind)})


def tables(annotation: object) -> list[type[BaseModel]]:
    """The tables that an annotation names, through unions, lists and Annotated, in its order."""
    if typing.get_origin(annotation) is typing.Annotated:
        return tables(typing.get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return [table for part in typing.get_args(annotation) for table in tables(part)]
    return []


def _of(kind: object) -> str:
    if kind is typing.Any or not isinstance(kind, type):
        return "any"
    if kind is type(None):
        return "none"
    for plain in (bool, int, float):
        if issubclass(kind, plain):
            return plain.__name__
    if issubclass(kind, BaseModel | dict):
        return "table"
    return "list" if issubclass(kind, list | tuple | set | frozenset) else "str"


def _join(parts: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*parts)
