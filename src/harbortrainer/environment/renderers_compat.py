"""Use of renderers' private API: the models whose chat format it knows by name.

Written for renderers `WRITTEN_FOR`. `PRIVATE_APIS` lists the private names; they are checked at import.
"""

from renderers.base import MODEL_RENDERER_MAP

from harbortrainer.private_apis import PrivateApi

WRITTEN_FOR = "0.1"
PRIVATE_APIS = PrivateApi("renderers", WRITTEN_FOR, __name__, ("renderers.base:MODEL_RENDERER_MAP",))
PRIVATE_APIS.check()


def known_format(model: str) -> str | None:
    """Return the name of the chat format that the renderer `auto` has for a model of this name."""
    return MODEL_RENDERER_MAP.get(model)
