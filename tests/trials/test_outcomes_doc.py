"""The table in the documentation is the table in the code."""

from pathlib import Path

from harbortrainer.trials.outcome import Outcome

DOC = Path(__file__).parents[2] / "docs" / "outcomes.md"


def row(outcome: Outcome) -> str:
    again = "no"
    if outcome.retried:
        again = f"{outcome.retries} time{'s' * (outcome.retries > 1)}" + ", after a pause" * outcome.backoff
    yes = {True: "yes", False: "no"}
    return f"| `{outcome}` | {outcome.blame} | {yes[outcome.trains]} | {yes[outcome.flagged]} | {again} |"


def test_the_documents_table_is_the_codes():
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| `")]
    assert rows == [row(outcome) for outcome in Outcome]


def test_every_outcome_says_what_to_do():
    text = DOC.read_text()
    assert not [outcome for outcome in Outcome if f"**`{outcome}`**" not in text]
