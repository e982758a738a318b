"""Translation of run files between the pinned Prime-RL's key names and newer ones.

Contract: every other module knows the pinned keys only. `to_pinned` and `to_newer` keep the meaning of a file: where
the two releases have different defaults, the result sets the value. What has no equal is refused, or named in a note.
"""

from collections.abc import Iterator
from copy import deepcopy

from harbortrainer.config.prime_rl_key_names import (
    CONSTANT,
    DROPPED,
    EVAL,
    GROUP_TABLES,
    MOVED,
    NEWER_TABLES,
    OLDER,
    TRAIN,
    sources_in,
    where_set,
)
from harbortrainer.config.table import TomlTable, TomlValue, lookup
from harbortrainer.errors import UserError, joined

EPS, PINNED_EPS, PINNED_KL, PINNED_WEIGHT_DECAY = 0.3, 0.1, 1e-3, 0.01
"""Defaults: `eps` of newer releases; the pinned `ipo_threshold`, `kl_tau` and `weight_decay`."""

TABLES = (
    *("trainer", "trainer.loss", "trainer.optim", "orchestrator", TRAIN, *NEWER_TABLES),
    *(f"{group}.source.{table}" for group in (TRAIN, EVAL) for table in GROUP_TABLES),
)
NULLABLE_TABLES = (
    *(EVAL, "orchestrator.algo", f"{TRAIN}.algo", f"{TRAIN}.source.algo"),
    *(f"{TRAIN}.source.curriculum", f"{TRAIN}.source.curriculum.gates"),
)
"""Keys that a translation reads as tables."""

MISSING = object()

DEFAULT_ALGO = "grpo"
SIGNAL_GATE = {"signal": {"type": "advantage_range"}}
"""The pinned gate that replaces groups whose trials all got the same reward."""


def to_pinned(data: TomlTable, file: str) -> tuple[TomlTable, list[UserError]]:
    """Translate tables with the key names of newer releases to the pinned ones.

    Args:
        data: The tables; they are not changed.
        file: Name of the file, for errors.

    Returns:
        The new tables, and an error for each key that the pinned commit and the embedded engine have no equal of.

    Raises:
        UserError: The file also has a key that only the pinned commit has, or a value that should be a table is none.
    """
    for key, do in OLDER.items():
        for where in where_set(data, key):
            what = "this key is of the pinned Prime-RL, but other keys of the file are of a newer release"
            raise UserError(what, where=f"{file}: {where}", do=do)
    tables = _Tables(deepcopy(data), file)
    tables.require_tables()
    for group in (TRAIN, EVAL):
        tables.spread(group)
    constant = tables.take(CONSTANT)
    if not isinstance(constant, bool | None):
        tables.errors.append(tables.error(f"must be true or false, not {constant!r}", CONSTANT, "change the value"))
    for new, old in MOVED.items():
        if (value := tables.take(new)) is not None:
            tables.put(old, value)
    for number, source in enumerate(sources_in(tables.data, TRAIN)):
        at = f"{TRAIN}.source[{number}]"
        tables.read_select(source, at, limit=False)
        tables.read_train_source(source, at, constant=constant is None or constant is True)
    for number, source in enumerate(sources_in(tables.data, EVAL)):
        tables.read_select(source, f"{EVAL}.source[{number}]", limit=True)
    for key, harmless in (("top_p", 1.0), ("top_k", None)):
        tables.refuse_unless(harmless, f"{TRAIN}.sampling.{key}", "the policy trains on its whole distribution")
    tables.read_loss()
    return tables.data, tables.errors


def to_newer(data: TomlTable, file: str) -> tuple[TomlTable, list[str]]:
    """Translate tables with pinned key names to the key names of newer releases.

    Args:
        data: The tables; they are not changed.
        file: Name of the file, for errors.

    Returns:
        The new tables, and notes on what differs.

    Raises:
        UserError: A key has no equal in newer releases, or a value has the wrong type.
    """
    tables = _Tables(deepcopy(data), file)
    tables.require_tables()
    gate_notes = tables.write_gates()
    tables.write_algo()
    for new, old in MOVED.items():
        if (value := tables.take(old)) is not None:
            tables.put(new, value)
    tables.write_limits()
    dropped = [key for key in DROPPED if tables.take(key) is not None]
    notes = [f"removed, because newer releases do not need them: {', '.join(dropped)}"] if dropped else []
    if tables.take("orchestrator.token_batch_size") is not None:
        raise tables.error("newer releases have no such key", "orchestrator.token_batch_size", "set batch_size")
    if tables.take("orchestrator.train.filter_zero_advantages") is False:
        what, do = "newer releases always leave out tokens without an advantage", "remove it"
        raise tables.error(what, "orchestrator.train.filter_zero_advantages", do)
    return tables.data, [*gate_notes, *notes, *tables.write_loss()]


class _Tables:
    """Tables of a run file during a translation."""

    def __init__(self, data: TomlTable, file: str) -> None:
        self.data, self.file = data, file
        self.errors: list[UserError] = []

    def error(self, what: str, key: str, do: str) -> UserError:
        return UserError(what, where=f"{self.file}: {key}", do=do)

    def require_tables(self) -> None:
        """Raise `UserError` for each value that should be a table and is none."""
        found = [pair for key in TABLES for pair in _values(self.data, key)]
        found += [(at, value) for key in NULLABLE_TABLES for at, value in _values(self.data, key) if value is not None]
        gates = [(at, value) for at, value in found if at.endswith(".gates") and isinstance(value, dict)]
        found += [(f"{at}.{name}", gate) for at, value in gates for name, gate in value.items()]
        wrong = [(at, value) for at, value in found if not isinstance(value, dict)]
        if error := joined(
            self.error(f"must be a table, not {value!r}", at, "change the value") for at, value in wrong
        ):
            raise error

    def table(self, key: str) -> TomlTable:
        """Return the table at a key; an empty one that is in no file if there is none."""
        found = lookup(self.data, key)
        return found if isinstance(found, dict) else {}

    def take(self, key: str) -> TomlValue:
        """Remove and return a value; None if it is not set."""
        table, _, name = key.rpartition(".")
        return self.table(table).pop(name, None)

    def put(self, key: str, value: TomlValue) -> None:
        """Set a value; missing tables are added."""
        *tables, name = key.split(".")
        at = self.data
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = value

    def refuse_unless(self, harmless: TomlValue, key: str, why: str, holder: TomlTable | None = None) -> None:
        """Remove a key; note an error unless it is not set or has the harmless value."""
        name = key.rpartition(".")[2]
        table = self.table(key.rpartition(".")[0]) if holder is None else holder
        if name in table and table.pop(name) != harmless:
            do = "remove it, or run with --engine prime-rl and a newer checkout of Prime-RL"
            self.errors.append(self.error(f"not supported here: {why}", key, do))

    def spread(self, group: str) -> None:
        """Give each source the tables that it inherits in newer releases only."""
        for name in GROUP_TABLES:
            shared = self.take(f"{group}.{name}")
            for source in sources_in(self.data, group) if isinstance(shared, dict) else ():
                source[name] = _merged(shared, source.get(name, {}))
        shared = self.table(f"{group}.algo")
        for source in sources_in(self.data, group):
            own, kind = source.get("algo"), shared.get("type", DEFAULT_ALGO)
            if isinstance(own, dict) and own.get("type", kind) == kind:
                source["algo"] = _merged(shared, own)

    def read_select(self, source: TomlTable, at: str, *, limit: bool) -> None:
        select = source.pop("select", None)
        if not isinstance(select, dict):
            return
        count = select.pop("limit", None) if limit else None
        if count is not None:
            source["num_examples"] = count
        for name in [name for name, value in select.items() if value not in (None, False, 0, [], {})]:
            what = "not supported here"
            do = "use include, exclude and split of env.taskset"
            self.errors.append(self.error(what, f"{at}.select.{name}", do))

    def read_train_source(self, source: TomlTable, at: str, *, constant: bool) -> None:
        why = "a sample is left out only for an advantage of exactly 0"
        self.refuse_unless(0, f"{at}.min_abs_advantage", why, source)
        curriculum = {"sampler": source.pop("sampler")} if "sampler" in source else {}
        algo = source.get("algo") or self.table("orchestrator.algo")
        if constant and algo.get("type") != "echo":  # a sample of ECHO always has something to learn
            curriculum["gates"] = deepcopy(SIGNAL_GATE)
        if curriculum:
            source["curriculum"] = curriculum

    def read_loss(self) -> None:
        loss = self.table("trainer.loss")
        if loss.get("type", "ipo") == "ipo":
            own = {name: value for name, value in loss.items() if name != "eps"}
            self.put("trainer.loss", {"type": "ipo", "ipo_threshold": loss.get("eps", EPS), "kl_tau": 0.0} | own)
        why = "the embedded engine and the pinned commit have no correction of the score"
        self.refuse_unless(False, "trainer.loss.score_centering", why)
        if self.table("trainer.optim").get("weight_decay", "auto") == "auto":
            self.put("trainer.optim.weight_decay", 0.0)

    def write_gates(self) -> list[str]:
        """Replace each source's curriculum; return notes. Raises `UserError` if newer releases have no equal."""
        gated, of_echo = [], []
        for number, source in enumerate(sources_in(self.data, TRAIN)):
            at = f"{TRAIN}.source[{number}]"
            gates = self._take_gates(source, at)
            own = source.get("algo")
            algo = self.table("orchestrator.algo") if own is None else own
            if algo.get("type") != "echo":
                gated.append(gates)
            elif gates:
                of_echo.append(at)
        if any(gated) and not all(gated):
            what = f"only some sources have a gate; newer releases have {CONSTANT} for all"
            raise self.error(what, f"{TRAIN}.source", "give all sources such a gate, or none")
        if sources_in(self.data, TRAIN):
            self.put(CONSTANT, any(gated or of_echo))
        return [f"newer releases replace no group of ECHO: the gate has no effect there ({at})" for at in of_echo]

    def _take_gates(self, source: TomlTable, at: str) -> bool:
        """Remove the curriculum but for its sampler; return whether it had gates."""
        curriculum = source.pop("curriculum", None) or {}
        for name in curriculum.keys() - {"sampler", "gates"}:
            raise self.error("no such key", f"{at}.curriculum.{name}", "remove it, or set sampler or gates")
        if sampler := curriculum.get("sampler"):
            source["sampler"] = sampler
        gates = curriculum.get("gates") or {}
        for name, gate in gates.items():
            if gate.get("reject_min", 0) or gate.get("reject_max", 0):
                do = f"remove the gate; newer releases have {CONSTANT} and min_abs_advantage of a source"
                raise self.error("newer releases have no gates", f"{at}.curriculum.gates.{name}", do)
        return bool(gates)

    def write_algo(self) -> None:
        """Give each source the pinned `orchestrator.algo` if one has its own, which newer releases would merge."""
        sources = sources_in(self.data, TRAIN)
        if all(source.get("algo") is None for source in sources):
            return
        shared = self.take("orchestrator.algo")
        for source in sources:
            if source.get("algo") is not None:
                source["algo"].setdefault("type", DEFAULT_ALGO)
            elif shared is not None:
                source["algo"] = deepcopy(shared)

    def write_limits(self) -> None:
        """Replace `num_examples`; the shared number moves into the sources if one of them evaluates all its tasks."""
        sources = sources_in(self.data, EVAL)
        shared = self._take_count(self.table(EVAL), EVAL)
        own = [self._take_count(source, f"{EVAL}.source[{number}]") for number, source in enumerate(sources)]
        if -1 in own:
            own, shared = [shared if count is None else count for count in own], None
        for holder, count in zip([self.table(EVAL), *sources], [shared, *own], strict=True):
            if count not in (None, -1):
                holder["select"] = {"limit": count}
        for source in sources:
            source.pop("ratio", None)

    def _take_count(self, holder: TomlTable, at: str) -> int | None:
        count = holder.pop("num_examples", None)
        if isinstance(count, int | None):
            return None if count is None else max(count, -1)
        raise self.error(f"must be an integer, not {count!r}", f"{at}.num_examples", "change the value")

    def write_loss(self) -> list[str]:
        """Translate the loss and the weight decay; return notes on what differs."""
        notes = []
        loss = dict(self.table("trainer.loss"))
        if loss.get("type", "default") == "default":
            if "type" in loss or loss.keys() - {"type", "adv_tau"}:
                what, do = "newer releases have no loss of this type", 'set type = "ipo"'
                raise self.error(what, "trainer.loss.type", do)
            notes.append("no loss is named: newer releases train with ipo, the pinned commit with DPPO and KL")
        if loss.get("type") == "ipo":
            if not loss.keys() & {"eps", "ipo_threshold"}:
                default = f"eps = {PINNED_EPS:g}, the pinned default, was written"
                notes.append(f"no eps is set: {default}; the embedded engine took {EPS:g}")
            kl_tau = loss.pop("kl_tau", PINNED_KL if "eps" not in loss else 0.0)
            loss["eps"] = loss.pop("ipo_threshold", loss.get("eps", PINNED_EPS))
            self.put("trainer.loss", loss)
            if not isinstance(kl_tau, int | float):
                raise self.error(f"must be a number, not {kl_tau!r}", "trainer.loss.kl_tau", "change the value")
            if kl_tau:
                notes.append(f"newer releases have no KL term, which was kl_tau = {kl_tau:g} here")
        if self.table("trainer.optim").get("weight_decay") is None:
            self.put("trainer.optim.weight_decay", PINNED_WEIGHT_DECAY)
        return notes


def _values(data: TomlTable, key: str) -> Iterator[tuple[str, TomlValue]]:
    """Yield a key and its value if it is set. For a key of sources, yield one pair for each source that sets it."""
    group, found, name = key.partition(".source.")
    at = [(f"{group}.source[{index}].{name}", one) for index, one in enumerate(sources_in(data, group))]
    for where, table in at if found else [(key, data)]:
        if (value := lookup(table, name or key, MISSING)) is not MISSING:
            yield where, value


def _merged(shared: TomlTable, own: TomlTable) -> TomlTable:
    """Return the keys of both tables, recursively; `own` decides. A table with another `type` or `id` is its own."""
    if any(name in own and own[name] != shared.get(name) for name in ("type", "id") if name in shared):
        return own
    merged = deepcopy(shared)
    for name, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
