"""Which models the embedded engine can sample from, told from a config, before any weight is loaded.

transformers' continuous batching keeps keys and values and no other state, and puts an attention of its own registry
into the model.
"""

from typing import cast

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from harbortrainer.couplings import Couplings, places_in
from harbortrainer.errors import UserError

_USED = {
    "transformers:PreTrainedConfig": "per_layer_attributes",
    "transformers:PreTrainedModel": "_is_stateful; _supports_attention_backend; _supports_sdpa",
}
COUPLINGS = Couplings("transformers", "5.23", __name__, places_in(_USED))
COUPLINGS.check()

_KEPT = {"full_attention", "sliding_attention"}
_ELSEWHERE = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'


def need_sampled(config: PreTrainedConfig, model: str, *, where: str = "") -> None:
    """Do nothing where the model's kind can be sampled from.

    Args:
        model: Its name, for the message.
        where: The key that named it, where there is one.

    Raises:
        UserError: It cannot; says why, and what can.
    """
    if why := _why_not(config):
        raise unsampled(model, why, where=where)


def unsampled(model: str, why: str, *, where: str = "") -> UserError:
    """What to tell of a model that cannot be sampled from."""
    return UserError(f"the embedded engine cannot sample from {model}: {why}", where=where, do=_ELSEWHERE)


def _why_not(config: PreTrainedConfig) -> str:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal language model of the kind {config.model_type}"
    found = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    text = config.get_text_config()
    if kinds := set(getattr(text, "layer_types", None) or ()) - _KEPT:
        return f"{found.__name__} has layers of {', '.join(sorted(kinds))}; only full and sliding attention is batched"
    if unlike := text.per_layer_attributes:
        return f"{found.__name__} has layers that differ in {', '.join(sorted(unlike))}, which are not batched"
    if getattr(text, "qk_nope_head_dim", 0) and text.qk_nope_head_dim + text.qk_rope_head_dim != text.v_head_dim:
        return f"{found.__name__} has values of another width than its keys, which are not batched"
    if found._is_stateful:
        return f"{found.__name__} keeps more than keys and values of what came before"
    if not (found._supports_sdpa and found._supports_attention_backend):
        return f"{found.__name__} has an attention of its own, which cannot be batched"
    return ""
