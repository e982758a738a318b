"""Chat formats of models, and renderers' private API for them: the models whose format it knows by name.

Written for renderers `WRITTEN_FOR`. `PRIVATE_APIS` lists the private names; they are checked at import.
"""

from renderers.base import MODEL_RENDERER_MAP

from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable
from harbortrainer.private_apis import PrivateApi

WRITTEN_FOR = "0.1"
PRIVATE_APIS = PrivateApi("renderers", WRITTEN_FOR, __name__, ("renderers.base:MODEL_RENDERER_MAP",))
PRIVATE_APIS.check()


def known_format(model: str) -> str | None:
    """Return the name of the chat format that the renderer `auto` has for a model of this name."""
    return MODEL_RENDERER_MAP.get(model)


def with_chat_format(run: RunConfig) -> RunConfig:
    """Return the run with a named chat format if its format is `auto` and renderers does not know the policy's name.

    A warm-up's policy has the format of the model it starts from. Any other unknown model has its own template.
    """
    table: TomlTable = {"name": "auto"} | run.orchestrator.renderer
    known = known_format(run.starting_model[0])
    if table["name"] != "auto" or (known and not run.warmup):
        return run
    table |= {"name": known} if known else APPENDING_TEMPLATE
    return run.model_copy(update={"orchestrator": run.orchestrator.model_copy(update={"renderer": table})})
