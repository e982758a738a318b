"""The table in the documentation is the table in the code."""

from pathlib import Path

from harbortrainer.trials.outcome import Outcome

DOC = Path(__file__).parents[2] / "docs" / "outcomes.md"


def row(outcome: Outcome) -> str:
    again = "no"
    if outcome.retries:
        again = f"{outcome.retries} time{'s' * (outcome.retries > 1)}" + ", after a pause" * (outcome.pause_s > 0)
    yes = {True: "yes", False: "no"}
    return f"| `{outcome}` | {outcome.blame} | {yes[outcome.trains]} | {yes[outcome.flagged]} | {again} |"


def test_the_documents_table_is_the_codes():
    table = DOC.read_text().partition("| outcome | who")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [row(outcome) for outcome in Outcome]


def test_every_outcome_says_what_to_do():
    text = DOC.read_text()
    assert not [outcome for outcome in Outcome if f"**`{outcome}`**" not in text]
