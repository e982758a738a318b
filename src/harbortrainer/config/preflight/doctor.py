"""Runs the checks that matter for a run and shows what they found."""

from collections.abc import Callable, Iterable, Iterator

from harbortrainer.config.preflight import credentials, docker, gpus, machine, model, numbers, prime_rl, tasks
from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, Level
from harbortrainer.errors import UserError

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    prime_rl.check,
    gpus.check,
    model.check,
    tasks.check,
    numbers.check,
    machine.check_tools,
    docker.check,
    credentials.check_providers,
    credentials.check_dotenv,
    credentials.check_wandb,
    machine.check_ports,
    machine.check_disk,
)
COLOURS = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "red"}


def examine(facts: Facts) -> Iterator[Finding]:
    """What every check finds, in an order that a person reads."""
    for check in CHECKS:
        yield from check(facts)


def stop_on_red(findings: list[Finding]) -> None:
    """Refuse to start.

    Raises:
        UserError: The first red finding, and how many more there are.
    """
    reds = [finding for finding in findings if finding.level is Level.RED]
    if reds:
        more = f" (and {len(reds) - 1} more; `harbortrainer doctor` shows all)" if len(reds) > 1 else ""
        raise UserError(reds[0].what + more, where=reds[0].about, do=reds[0].do)


def warn(findings: list[Finding]) -> None:
    """One line for each yellow finding."""
    for finding in findings:
        if finding.level is Level.YELLOW:
            print(f"warning: {finding.about}: {finding.what}; {finding.do}")


def show(findings: list[Finding]) -> None:
    """A table: colour, what was looked at, what was found, what to do."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, show_header=False, padding=(0, 1))
    for finding in findings:
        colour = COLOURS[finding.level]
        what = f"{finding.what}\n-> {finding.do}" if finding.do else finding.what
        table.add_row(f"[{colour}]{colour}[/]", finding.about, _plain(what))
    Console().print(table)


def _plain(text: str) -> str:
    """Square brackets are not markup."""
    from rich.markup import escape

    return escape(text)
