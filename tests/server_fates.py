"""What becomes of each fault of the model's server, as docs/outcomes.md says it, and trials that meet one.

The table has a column for each place where the tests play the faults; each test compares its own.
"""

from pathlib import Path

from fakes import keys
from scripted_engine import by_turn

DOC = Path(__file__).parents[1] / "docs" / "outcomes.md"
PLACES = ("local", "docker", "Prime-RL")

GOES_ON = by_turn([keys("mkdir -p /app && touch /app/answer"), keys("ls")])
SHORT = {"stall_min_s": 4.0, "stall_factor": 3.0, "agent_kwargs": {"model_retries": 0}}
"""Settings of the harness: a call has stalled after 4 s, and is tried once."""


def documented(heading: str, place: str) -> dict[str, str]:
    """The outcome by the row's name, of the documents' table that begins with `heading`; "-" is not played there."""
    table = DOC.read_text().partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()
    column = [cell.strip(" `") for cell in table[0].split("|")].index(place)
    rows = [line.split("|")[1:] for line in table[2:]]
    told = {row[0].split("`")[1]: row[column + 1].strip(" `") for row in rows}
    return {name: outcome for name, outcome in told.items() if outcome != "-"}


def fates(place: str) -> dict[str, str]:
    """The outcome of each fault of the server's."""
    return documented("the server", place)
