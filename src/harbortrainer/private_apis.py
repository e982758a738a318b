"""Checks that a library's private names still exist with the expected parameters.

A module that uses private names of a library lists them in a `PrivateApi` and checks it before it imports them. A
release without such a name, or with other parameters, raises one `UserError` with library, releases and name, instead
of an `AttributeError` during a run.
"""

import dis
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from harbortrainer.errors import UserError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class PrivateApi:
    """The private names of a library that one of our modules uses.

    Attributes:
        library: The library's name on PyPI.
        written_for: The supported release, without the patch level.
        used_by: Our module.
        places: The names: `module:name`, or `module:Class.attribute` of a class or its instances. A function may have
            its parameters, without `self`: `module:Class.method(a, b)` has exactly these, `(a, b, ...)` may have
            further optional ones.
    """

    library: str
    written_for: str
    used_by: str
    places: tuple[str, ...]

    def check(self) -> None:
        """Raise `UserError` for the first name that is missing or has other parameters."""
        for place in self.places:
            self.check_place(place)

    def check_place(self, place: str) -> None:
        """Raise `UserError` when this name is missing or has other parameters."""
        if fault := fault_at(place):
            raise UserError(
                f"{fault}; {self.used_by} was written for {self.library} {self.written_for}",
                where=f"{self.library} {version(self.library)}",
                do=f"install {self.library} {self.written_for}.*",
            )


def places_in(homes: Mapping[str, str]) -> tuple[str, ...]:
    """Expand `{"module" or "module:Class": "name; name"}` to a tuple of places."""
    return tuple(
        f"{home}{'.' if ':' in home else ':'}{name.strip()}"
        for home, names in homes.items()
        for name in names.split(";")
    )


def fault_at(place: str) -> str:
    """Describe what is wrong with a place; empty if nothing is."""
    path, takes, parameters = place.removesuffix(")").partition("(")
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return f"there is no module {module}"
    for name in names.split("."):
        if not hasattr(found, name):
            return "" if name in _instance_attributes(found) else f"there is no {path}"
        found = getattr(found, name)
    return _parameter_fault(path, found, [p for p in parameters.split(", ") if p]) if takes else ""


def _parameter_fault(path: str, found: object, wanted: list[str]) -> str:
    if not callable(found):
        return f"{path} is not a function"
    actual = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    count = len(wanted)
    if wanted[-1:] == ["..."]:
        count -= 1
        actual = [p for i, p in enumerate(actual) if i < count or (p.default is p.empty and p.kind not in _VARIADIC)]
    names = [p.name for p in actual]
    return "" if names == wanted[:count] else f"{path} takes ({', '.join(names)}), not ({', '.join(wanted)})"


def _instance_attributes(found: object) -> Iterator[str]:
    """Names of a class's instance attributes: those it annotates, and those its methods assign."""
    mro = inspect.getmro(found) if inspect.isclass(found) else ()
    for kind in (kind for kind in mro if kind.__module__.split(".")[0] == mro[0].__module__.split(".")[0]):
        yield from inspect.get_annotations(kind)
        for method in filter(inspect.isfunction, vars(kind).values()):
            yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")
