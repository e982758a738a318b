"""The help of the command line: commands in groups, and two examples for each command."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from typer.core import TyperGroup

GROUPS = {
    "Prepare": ("init", "tasks", "doctor"),
    "Train": ("train", "warmup", "serve-env"),
    "Evaluate and inspect": ("eval", "rollout", "view"),
    "Use the model": ("export", "serve"),
    "Maintain": ("config", "images", "sandboxes"),
}
"""The commands by the title of their group."""

EXAMPLES = {
    "init": ("init my-tasks", "init my-tasks --model Qwen/Qwen3-8B --gpus 8 --gpu-memory 80"),
    "train": ("train --config run.toml", "train --config run.toml --resume --max-steps 200"),
    "doctor": ("doctor", "doctor --config run.toml"),
    "warmup": (
        "warmup --model Qwen/Qwen3-0.6B --tasks my-tasks --out outputs/warm",
        "warmup --from outputs/run --out outputs/warm",
    ),
    "eval": (
        "eval my-tasks --model outputs/run --attempts 4",
        "eval my-tasks --base-url http://localhost:8000/v1 --model NAME",
    ),
    "export": ("export outputs/run", "export outputs/run --merged --push ORG/NAME"),
    "serve": ("serve outputs/run", "serve Qwen/Qwen3-0.6B --port 8000"),
    "serve-env": (
        "serve-env --config run.toml",
        "serve-env --config run.toml --address tcp://10.0.0.7:6000 --source hard-tasks",
    ),
    "rollout": ("rollout my-tasks/first --agent oracle", "rollout my-tasks/first --model outputs/run"),
    "view": ("view outputs/run", "view outputs"),
    "images list": ("images list", "images list --cache-dir /data/images"),
    "images prune": ("images prune", "images prune --to 0"),
    "sandboxes list": ("sandboxes list", "sandboxes list outputs/run"),
    "sandboxes end": ("sandboxes end --all", "sandboxes end outputs/run --yes"),
    "config upgrade": ("config upgrade run.toml", "config upgrade run.toml --to v0.9 --output new.toml"),
    "tasks new": ("tasks new my-tasks/first", "tasks new my-tasks/second"),
    "tasks check": ("tasks check my-tasks", "tasks check my-tasks --limit 10 --markdown checks.md"),
    "tasks audit": ("tasks audit my-tasks --benchmark heldout-tasks", "tasks audit my-tasks --json audit.json"),
    "tasks list": ("tasks list my-tasks", "tasks list my-tasks --include 'git-*' --json"),
    "tasks fetch": ("tasks fetch NAME@VERSION", "tasks fetch hf:ORG/NAME@REVISION --to my-tasks"),
    "tasks split": ("tasks split my-tasks", "tasks split my-tasks --eval-share 0.3 --write"),
    "tasks overlap": ("tasks overlap train-tasks eval-tasks", "tasks overlap train-tasks hf:ORG/NAME@REVISION"),
}
"""Two command lines of each command."""


def examples(command: str) -> str:
    """Return the text below a command's options: its examples, each on a line of its own."""
    lines = "".join(f"harbortrainer {line}\n" for line in EXAMPLES[command])
    return f"Examples:\n\n\b\n{lines}"


class HelpFormatter(Protocol):
    """The part of click's formatter that is used here; typer does not export it."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]: ...
    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None: ...


class GroupedHelp(TyperGroup):
    """A command group whose help lists the commands by `GROUPS`."""

    def format_commands(self, ctx: object, formatter: HelpFormatter) -> None:
        """Write a section for each group."""
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(formatter.width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)
