"""All that goes behind the public surface of renderers: which models' chat formats it knows by their names.

Written for renderers `WRITTEN_FOR`; `COUPLINGS` lists what is touched, and is checked before the first use.
"""

from harbortrainer.couplings import Couplings

WRITTEN_FOR = "0.1"
COUPLINGS = Couplings("renderers", WRITTEN_FOR, __name__, ("renderers.base:MODEL_RENDERER_MAP",))
COUPLINGS.check()

from renderers.base import MODEL_RENDERER_MAP  # noqa: E402 (not before the check)


def has_known_format(model: str) -> bool:
    """Whether the renderer "auto" has a chat format of its own for a model of this name."""
    return model in MODEL_RENDERER_MAP
