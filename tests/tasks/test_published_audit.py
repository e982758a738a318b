"""The published audit: its page has the figures of its JSON files."""

import json
from itertools import chain
from pathlib import Path

from harbortrainer.tasks.cheats import CHEATS, MUTANTS

ROOT = Path(__file__).parents[2]
AUDIT = ROOT / "docs/audit"


def test_published_audit_has_figures_of_its_json():
    page, rows, findings, authors, total = (AUDIT / "index.md").read_text(), [], [], set(), 0
    for one in json.loads((AUDIT / "audit.json").read_text()):
        weak = {name for name, found in one["tasks"].items() if any(f["severity"] == "weak" for f in found)}
        cells = (one["repository"], one["commit"][:12], len(one["tasks"]), one["unreadable"], len(weak))
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        findings += [f"{one['repository']}: {name}" for name in weak]
        authors.add(one["repository"].split("/")[0])
        total += len(one["tasks"])
    assert [line for line in page.splitlines() if line in rows] == rows
    assert f"{total} tasks of {len(authors)} authors: {len(findings)} have a finding." in page
    assert all(f"| {finding} | " in page for finding in findings)
    assert f"{total} tasks of {len(authors)} authors" in (ROOT / "docs/check-tasks.md").read_text().replace("\n", " ")


def test_published_trials_have_figures_of_their_json():
    page, rows, sums = (AUDIT / "index.md").read_text(), [], [0] * 6
    for one in json.loads((AUDIT / "trials.json").read_text()):
        tasks = list(one["tasks"].values())
        built = [rewards for rewards in tasks if rewards["oracle"] != ["sandbox_error"]]
        solved = [rewards for rewards in built if set(rewards["oracle"]) == {1.0}]
        cheated = [rewards for rewards in solved if any(1.0 in rewards.get(cheat, ()) for cheat in CHEATS)]
        spoils = {name for name in chain(*solved) if name.startswith("guessed-") or name in MUTANTS}
        spoiled = [rewards for rewards in solved if any(1.0 in rewards.get(spoil, ()) for spoil in spoils)]
        counts = [
            len(tasks),
            len(tasks) - len(built),
            len(built) - len(solved),
            len(solved),
            len(cheated),
            len(spoiled),
        ]
        rows.append(f"| {one['repository']} | {one['commit'][:12]} | {' | '.join(map(str, counts))} |")
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
    rows.append(f"| **all** | | {' | '.join(map(str, sums))} |")
    assert [line for line in page.splitlines() if line in rows] == rows
