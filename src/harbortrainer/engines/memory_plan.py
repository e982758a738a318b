"""The memory plan of the embedded engine, by part. `memory_count` computes it before anything is loaded.

The doctor prints it; on a GPU, sampler and learner then use its numbers.

The learner's largest micro batch is reserved first. The cache gets the rest, up to its share. If not even one request
fits, the micro batch shrinks, down to one sample of the longest length.
"""

from dataclasses import dataclass

from harbortrainer.engines.engine_choice import LORA_ADVICE
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH
from harbortrainer.engines.local.learner.trained_policy import CHUNK_ELEMENTS
from harbortrainer.engines.memory_parts import CacheBytes, ForwardPass, cache_tokens
from harbortrainer.errors import UserError

LOGITS_COPIES = 6
"""Float32 copies of a chunk of logits alive at once: the logits, the scaled logits, log-softmax, its exponential, their
product, and a gradient."""
EXTRA_VERSIONS = 3
"""Versions that the learner keeps besides those that may still train: the last evicted one, version 0 and, briefly, the
next one to evict."""
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the computing device, by part. Token counts refer to one sequence unless stated otherwise."""

    device_type: str
    """Type of the device: "cpu" or "cuda"."""
    capacity: int
    """The memory available for all parts."""
    weights: int
    """The base: once, or twice with full fine-tuning. For a quantized base also its largest layer, dequantized on
    either side."""
    trained: int
    """Both sides' LoRA, the float32 masters, their gradients and their optimizer state."""
    version: int
    """One policy version; the learner keeps several in the machine's memory. 0 for a LoRA's."""
    versions: int
    """Number of policy versions that the learner keeps."""
    cache_bytes: CacheBytes
    """Keys and values of a cached token, with its mask columns if there are masks; and the state of a request."""
    forward: ForwardPass
    """The sampler's largest forward pass."""
    saved_per_token: int
    """What a token of a micro batch saves for the backward pass."""
    recomputed_per_token: int
    """What recomputing a block adds per token; 0 without activation checkpointing."""
    mask_per_pair: int
    """Mask bytes of a pair of tokens of a sample; 0 without masks. With masks, samples are computed one by one."""
    vocab: int
    model_limit: int
    """The longest sequence that the model supports."""

    def micro_batch(self, context: int, seq_len: int) -> int:
        """Return the tokens of the learner's micro batch: at least `seq_len`, fewer if the cache needs the memory.

        Args:
            context: Tokens of the sampler's longest request.
            seq_len: Tokens of the learner's longest sample.
        """
        tokens = seq_len if self.mask_per_pair else MICRO_BATCH[self.device_type]
        while tokens > seq_len and self._cache(context, max(tokens, seq_len)) < context:
            tokens = max(tokens // 2, seq_len)
        return tokens

    def cache(self, context: int, seq_len: int) -> int:
        """Return the tokens that the sampler's cache holds; 0 if not even one request of `context` tokens fits."""
        tokens = self._cache(context, max(self.micro_batch(context, seq_len), seq_len))
        return tokens if tokens >= context else 0

    def _cache(self, context: int, micro_batch: int) -> int:
        free, per_token = max(0, self.capacity - self.weights), self.cache_bytes.token(context)
        others = self.trained + self.kept_versions + self.learner(micro_batch) + self.forward.total(context, 0)
        remaining = max(0, free - others) // (per_token + self.forward.cache_per_token)
        affordable, tokens = cache_tokens(free, self.device_type, per_token, context)
        return min(affordable, tokens, remaining)

    @property
    def kept_versions(self) -> int:
        """Bytes of kept versions on the computing device: all on a CPU, none on a GPU."""
        return self.version * self.versions if self.device_type == "cpu" else 0

    def learner(self, tokens: int) -> int:
        """Return the bytes of a micro batch of this many tokens."""
        logits = min(CHUNK_ELEMENTS, tokens * self.vocab)
        per_token = self.saved_per_token + self.recomputed_per_token + tokens * self.mask_per_pair
        return tokens * per_token + LOGITS_COPIES * 4 * logits

    def breakdown(self, context: int, seq_len: int) -> dict[str, int]:
        """Return the bytes of each part by its name; their sum is the peak."""
        tokens, cached = max(self.micro_batch(context, seq_len), seq_len), self.cache(context, seq_len)
        return {
            "model twice" if self.version else "model": self.weights,
            "gradient and optimizer" if self.version else "adapter and optimizer": self.trained,
            **({f"{self.versions} versions": self.kept_versions} if self.kept_versions else {}),
            f"cache for {cached // context} trials of {context} tokens at once": cached
            * self.cache_bytes.token(context),
            "sampler's forward pass": self.forward.total(context, cached),
            f"learner's {tokens} tokens at once, seq_len {seq_len}": self.learner(tokens),
        }

    def fits(self, context: int, seq_len: int) -> bool:
        """Whether the run fits.

        Args:
            context: Tokens of the sampler's longest request.
            seq_len: Tokens of the learner's longest sample.
        """
        return self.cache(context, seq_len) > 0

    def memory_error(self, context: int, seq_len: int) -> UserError | None:
        """Return the error of a run that does not fit, with the longest length that does; None if it fits."""
        if self.fits(context, seq_len):
            return None
        what = self.summary(context, seq_len)
        if self.max_length:
            return UserError(what, where="seq_len", do=f"set it to {self.max_length} or less")
        if self.version:
            return UserError(what, where="trainer.model.lora", do=LORA_ADVICE)
        return UserError(what, where="model.name", do="use a smaller model, or Prime-RL (docs/sizing.md)")

    def host_memory_error(self, capacity: int) -> UserError | None:
        """Return the error if a GPU run's kept versions exceed `capacity` bytes of the machine's memory, else None."""
        needed = self.version * self.versions
        if self.device_type == "cpu" or needed <= capacity:
            return None
        what = (
            f"{self.versions} kept versions of the model need {needed / GIB:.2f} of {capacity / GIB:.2f} GiB of memory"
        )
        if self.version * (1 + EXTRA_VERSIONS) <= capacity:
            steps = capacity // self.version - EXTRA_VERSIONS - 1
            return UserError(what, where="orchestrator.max_off_policy_steps", do=f"set it to {steps} or less")
        return UserError(what, where="trainer.model.lora", do=LORA_ADVICE)

    def summary(self, context: int, seq_len: int) -> str:
        """Return the plan as one sentence."""
        parts = self.breakdown(context, seq_len)
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        total, capacity = sum(parts.values()) / GIB, self.capacity / GIB
        longest = f"the longest sequence that fits has {self.max_length} tokens"
        return f"GiB: {listed}; {total:.2f} of {capacity:.2f}; {longest}"

    @property
    def max_length(self) -> int:
        """The longest sequence that fits, at most the model's limit; in steps of 256, 0 for none."""
        return self.longest(1)

    def longest(self, count: int) -> int:
        """Return the longest length at which the cache holds `count` sequences at once; `max_length` is for one."""

        def fits(tokens: int) -> bool:
            return self.cache(tokens, tokens) >= count * tokens

        if fits(self.model_limit):
            return self.model_limit
        low, high = 0, self.model_limit // 256
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(256 * middle) else (low, middle - 1)
        return 256 * low
