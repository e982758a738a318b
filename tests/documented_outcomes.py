"""Outcomes documented in docs/outcomes.md, and settings for trials with a faulty model server.

The tables have one column per place in which tests run the faults. Each test compares its own column.
"""

from pathlib import Path

from fakes import keys
from scripted_engine import by_turn

DOC = Path(__file__).parents[1] / "docs" / "outcomes.md"
PLACES = ("local", "docker", "Prime-RL")

GOES_ON = by_turn([keys("mkdir -p /app && touch /app/answer"), keys("ls")])
SHORT = {"stall_min_s": 4.0, "stall_factor": 3.0, "agent_kwargs": {"model_retries": 0}}
"""Harness settings: a call has stalled after 4 s and is not retried."""


def documented(heading: str, place: str) -> dict[str, str]:
    """Return the outcome by row name, from the table that begins with `heading`; rows with "-" are not run there."""
    table = DOC.read_text().partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()
    column = [cell.strip(" `") for cell in table[0].split("|")].index(place)
    rows = [line.split("|")[1:] for line in table[2:]]
    outcomes = {row[0].split("`")[1]: row[column + 1].strip(" `") for row in rows}
    return {name: outcome for name, outcome in outcomes.items() if outcome != "-"}


def fault_outcomes(place: str) -> dict[str, str]:
    """Return the outcome of each server fault."""
    return documented("the server", place)
