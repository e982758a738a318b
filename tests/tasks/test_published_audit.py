"""The published audit: its page has the figures of its JSON file."""

import json
from pathlib import Path

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
