"""Tests that docs/outcomes.md matches the outcome table of the code."""

from pathlib import Path

from harbortrainer.trials.outcome import Outcome

DOC = Path(__file__).parents[2] / "docs" / "outcomes.md"


def row(outcome: Outcome) -> str:
    retries = "no"
    if outcome.retries:
        retries = f"{outcome.retries}" + ", after a pause" * (outcome.pause_s > 0)
    yes = {True: "yes", False: "no"}
    return f"| `{outcome}` | {outcome.blame} | {yes[outcome.trains]} | {yes[outcome.flagged]} | {retries} |"


def test_documented_table_equals_the_code():
    table = DOC.read_text().partition("| outcome | cause")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [row(outcome) for outcome in Outcome]


def test_every_outcome_has_a_remedy():
    text = DOC.read_text()
    assert not [outcome for outcome in Outcome if f"**`{outcome}`**" not in text]
