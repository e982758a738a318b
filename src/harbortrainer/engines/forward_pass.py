"""What the sampler's forward pass takes beside the cache, counted before anything is loaded.

By hand: the tests hold a layer's part and the drawing to what torch allocates for them.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from harbortrainer.engines.cache_size import (
    MAX_REQUESTS,
    PAGE_SIZE,
    batch_tokens,
    head_dim,
    keys_and_values,
    kv_heads,
)
from harbortrainer.engines.decode_graphs import MOST_PAGES
from harbortrainer.engines.local.sampler.draw import DRAWN_ELEMENTS
from harbortrainer.engines.packed_attention import attends_to_all

_FLOAT = 4
_PLACE = 4
"""Numbers as large as a token's own number and its position."""
_DRAWN = 64
"""Bytes of a logit that is drawn from: float32 and doubles, and where a request truncates their order and its ranks."""


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """Bytes that the sampler's largest forward pass takes beside the cache, as long as it lasts.

    Attributes:
        layer: What its tokens have within a layer.
        logits: Of all requests.
        drawn: What is made of those logits that are drawn from at once.
        graphs: What CUDA graphs keep of what they read of the cache, and not their own logits; 0 on a CPU.
        past_token: For each token of a request's past its column of the mask; 0 where the cache counts it.
        cached_token: For each token of the cache what a layer reads of it, padded; 0 where the cache counts it.
    """

    layer: int
    logits: int
    drawn: int
    graphs: int
    past_token: int
    cached_token: int

    @classmethod
    def of(cls, model: PreTrainedModel, kind: str) -> "ForwardPass":
        """Of a model on any device, for one of this kind ("cpu" or "cuda")."""
        config, size = model.config.get_text_config(), model.dtype.itemsize
        tokens, to_all = batch_tokens(model.config, kind), attends_to_all(model.config)
        logits = MAX_REQUESTS * config.vocab_size
        read = keys_and_values(model) // config.num_hidden_layers if to_all else 0
        return cls(
            layer=tokens * (_widest(config) * size + 2 * config.hidden_size * _FLOAT),
            logits=logits * (size + (_FLOAT if size < _FLOAT else 0)),
            drawn=min(DRAWN_ELEMENTS, logits) * _DRAWN,
            graphs=MOST_PAGES * PAGE_SIZE * read if kind == "cuda" else 0,
            past_token=tokens * size if to_all else 0,
            cached_token=2 * read,
        )

    def beside(self, context: int, cached: int) -> int:
        """All of it, for requests of at most `context` tokens and with so many in the cache."""
        fixed = self.layer + self.logits + self.drawn + self.graphs
        return fixed + context * self.past_token + cached * self.cached_token


def _widest(config: PreTrainedConfig) -> int:
    """Numbers that a token has at once within a layer: what came in, its norm and its position, and either queries,
    keys, values and what was attended, or the two halves of the feed-forward part and their product, for as many
    experts as it goes to, with their choice."""
    attended = (3 * config.num_attention_heads + 4 * kv_heads(config)) * head_dim(config)
    inner = _most(config, "intermediate_size") or 4 * config.hidden_size
    expert = 3 * (_most(config, "moe_intermediate_size") or inner) + 2 * config.hidden_size
    chosen = 2 * _most(config, "num_experts", "num_local_experts")
    within = max(attended, 3 * inner, _most(config, "num_experts_per_tok") * (expert + chosen))
    return 2 * config.hidden_size + 2 * head_dim(config) + _PLACE + within


def _most(config: PreTrainedConfig, *names: str) -> int:
    """What a config says under the first of these names that it has, of the layer with most of it; 0 without one."""
    said = next((number for name in names if (number := getattr(config, name, None))), 0)
    return max(said) if isinstance(said, list) else said
