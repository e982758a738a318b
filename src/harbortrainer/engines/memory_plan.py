"""What the embedded engine will hold in memory, part by part: what the doctor prints, and what sampler and learner then
take on a GPU. `memory_count` counts it, before anything is loaded.

The learner comes first: what its largest micro batch needs is left to it, and the cache gets what remains, up to its
share. Where that leaves no room for one request, the micro batch gives way, down to one sample of the longest length.
"""

from dataclasses import dataclass

from harbortrainer.engines.cache_size import cache_tokens
from harbortrainer.engines.engine_choice import LORA_INSTEAD
from harbortrainer.engines.forward_pass import ForwardPass
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH
from harbortrainer.engines.local.learner.trained_policy import CHUNK_ELEMENTS
from harbortrainer.errors import UserError

LOGITS = 6
"""Float32 copies of a chunk of logits at once: the logits, divided by the temperature, their softmax's logarithm, its
exponential, their product, and a gradient."""
KEPT_BESIDE = 3
"""Versions that the learner has beside those that may still train: the one forgotten last, version 0, and for a moment
the one that is forgotten next."""
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device that computes; tokens are of one sequence unless said otherwise."""

    kind: str
    """Of device: "cpu" or "cuda"."""
    room: int
    """What there is for all of it."""
    weights: int
    """The base, once, and twice where every weight is trained; of a quantized one also its largest layer as either side
    computes with it."""
    trained: int
    """The LoRA of both sides, the float32 masters, their gradient and their optimizer."""
    version: int
    """One policy version, of which the learner keeps several in the machine's memory; 0 for a LoRA's."""
    versions: int
    """How many it keeps."""
    cached_token: int
    """Keys and values of a token, and its columns of the masks where there are any."""
    forward: ForwardPass
    """The sampler's largest."""
    kept_token: int
    """What a token of a micro batch leaves for the backward pass."""
    block_token: int
    """What computing a block again adds, a token; 0 where nothing is computed again."""
    pair: int
    """What two tokens of a sample have in masks; 0 where none is made. Samples go one by one where there are."""
    vocab: int
    longest_known: int
    """Tokens that the model was made for."""

    def micro_batch(self, context: int, seq_len: int) -> int:
        """Tokens of the learner's micro batch: all that are of use, less where the cache has no room beside them, and
        no fewer than a sample of `seq_len` tokens has."""
        tokens = seq_len if self.pair else MICRO_BATCH[self.kind]
        while tokens > seq_len and self._cache(context, max(tokens, seq_len)) < context:
            tokens = max(tokens // 2, seq_len)
        return tokens

    def cache(self, context: int, seq_len: int) -> int:
        """Tokens that the sampler's cache holds, 0 when not one request of that length fits."""
        tokens = self._cache(context, max(self.micro_batch(context, seq_len), seq_len))
        return tokens if tokens >= context else 0

    def _cache(self, context: int, micro_batch: int) -> int:
        free = max(0, self.room - self.weights)
        others = self.trained + self.kept + self.learner(micro_batch) + self.forward.beside(context, 0)
        left = max(0, free - others) // (self.cached_token + self.forward.cached_token)
        affordable, tokens = cache_tokens(free, self.kind, self.cached_token, context)
        return min(affordable, tokens, left)

    @property
    def kept(self) -> int:
        """Bytes of the versions that are kept where the model computes: on a CPU all."""
        return self.version * self.versions if self.kind == "cpu" else 0

    def learner(self, tokens: int) -> int:
        """Bytes of a micro batch of so many tokens."""
        logits = min(CHUNK_ELEMENTS, tokens * self.vocab)
        return tokens * (self.kept_token + self.block_token + tokens * self.pair) + LOGITS * 4 * logits

    def parts(self, context: int, seq_len: int) -> dict[str, int]:
        """Bytes by what they are for; their sum is everything at once."""
        tokens, cached = max(self.micro_batch(context, seq_len), seq_len), self.cache(context, seq_len)
        return {
            "model twice" if self.version else "model": self.weights,
            "gradient and optimizer" if self.version else "adapter and optimizer": self.trained,
            **({f"{self.versions} versions": self.kept} if self.kept else {}),
            f"cache for {cached // context} trials of {context} tokens at once": cached * self.cached_token,
            "sampler's forward pass": self.forward.beside(context, cached),
            f"learner's {tokens} tokens at once, seq_len {seq_len}": self.learner(tokens),
        }

    def fits(self, context: int, seq_len: int) -> bool:
        """Whether a run has room.

        Args:
            context: Tokens of the sampler's longest request.
            seq_len: Tokens of the learner's longest sample.
        """
        return self.cache(context, seq_len) > 0

    def refusal(self, context: int, seq_len: int) -> UserError | None:
        """What to say of a run that has no room, with the nearest length that has; None where it fits."""
        if self.fits(context, seq_len):
            return None
        what = self.told(context, seq_len)
        if self.longest:
            return UserError(what, where="seq_len", do=f"set it to {self.longest} or less")
        if self.version:
            return UserError(what, where="trainer.model.lora", do=LORA_INSTEAD)
        return UserError(what, where="model.name", do="use a smaller model, or Prime-RL (docs/sizing.md)")

    def host_refusal(self, room: int) -> UserError | None:
        """What to say where the versions that are kept beside a GPU do not fit into so many bytes of the machine's."""
        needed = self.version * self.versions
        if self.kind == "cpu" or needed <= room:
            return None
        what = f"{self.versions} versions of the model are kept, {needed / GIB:.2f} of {room / GIB:.2f} GiB of memory"
        if self.version * (1 + KEPT_BESIDE) <= room:
            most = room // self.version - KEPT_BESIDE - 1
            return UserError(what, where="orchestrator.max_off_policy_steps", do=f"set it to {most} or less")
        return UserError(what, where="trainer.model.lora", do=LORA_INSTEAD)

    def told(self, context: int, seq_len: int) -> str:
        """The plan in one sentence."""
        parts = self.parts(context, seq_len)
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        total, room = sum(parts.values()) / GIB, self.room / GIB
        return f"GiB: {listed}; {total:.2f} of {room:.2f}; the longest sequence that fits has {self.longest} tokens"

    @property
    def longest(self) -> int:
        """The longest sequence that has room, at most what the model was made for; in steps of 256, 0 for none."""
        if self.fits(self.longest_known, self.longest_known):
            return self.longest_known
        low, high = 0, self.longest_known // 256
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(256 * middle, 256 * middle) else (low, middle - 1)
        return 256 * low
