"""Whether a library's private side still is what we were written for.

A module that reaches behind a library's public surface lists the places that it touches (`Couplings`) and checks them
before it imports them. Contract: a release in which one is gone or takes other parameters is one `UserError` that
names the library, both releases and the place; never an AttributeError in the middle of a run.
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
class Couplings:
    """What one module of ours uses of a library's private side.

    Attributes:
        library: Its name on the index.
        written_for: The release, without its patch level.
        used_by: The module of ours.
        places: `module:name`, `module:Class.attribute` (of the class or of its objects), or with the parameters that
            we count on: `module:Class.method(a, b)` takes these and no others, `(a, b, ...)` may take more that have
            defaults. `self` is left out.
    """

    library: str
    written_for: str
    used_by: str
    places: tuple[str, ...]

    def check(self) -> None:
        """Raises `UserError` for the first place that is not as it was."""
        for place in self.places:
            self.check_place(place)

    def check_place(self, place: str) -> None:
        """Raises `UserError` when the place is not as it was."""
        if fault := fault_at(place):
            raise UserError(
                f"{fault}; {self.used_by} was written for {self.library} {self.written_for}",
                where=f"{self.library} {version(self.library)}",
                do=f"install {self.library} {self.written_for}.*",
            )


def places_in(homes: Mapping[str, str]) -> tuple[str, ...]:
    """Places from the names, separated by semicolons, that are used of each `module` or `module:Class`."""
    return tuple(
        f"{home}{'.' if ':' in home else ':'}{name.strip()}"
        for home, names in homes.items()
        for name in names.split(";")
    )


def fault_at(place: str) -> str:
    """What is wrong at `place`; "" when it is as it was."""
    path, takes, parameters = place.removesuffix(")").partition("(")
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return f"there is no module {module}"
    for name in names.split("."):
        if not hasattr(found, name):
            return "" if name in _set_on_objects(found) else f"there is no {path}"
        found = getattr(found, name)
    return _other_parameters(path, found, [p for p in parameters.split(", ") if p]) if takes else ""


def _other_parameters(path: str, found: object, wanted: list[str]) -> str:
    if not callable(found):
        return f"{path} is no function"
    taken = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    count = len(wanted)
    if wanted[-1:] == ["..."]:
        count -= 1
        taken = [p for i, p in enumerate(taken) if i < count or (p.default is p.empty and p.kind not in _VARIADIC)]
    names = [p.name for p in taken]
    return "" if names == wanted[:count] else f"{path} takes ({', '.join(names)}), not ({', '.join(wanted)})"


def _set_on_objects(found: object) -> Iterator[str]:
    """Names that objects of a class are given: what is annotated, and what its methods assign."""
    mro = inspect.getmro(found) if inspect.isclass(found) else ()
    for kind in (kind for kind in mro if kind.__module__.split(".")[0] == mro[0].__module__.split(".")[0]):
        yield from inspect.get_annotations(kind)
        for method in filter(inspect.isfunction, vars(kind).values()):
            yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")
