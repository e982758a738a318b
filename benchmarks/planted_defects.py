"""Audit tasks with planted defects and clean tasks, and count the found defects and the false alarms.

    python benchmarks/planted_defects.py --seed 1

All trials are real, in the local sandbox. The cheats of `tasks check` are left out: they find gaps of the shared
verifier, which all of these tasks have. A defect counts as found if a finding names it. A clean task counts as a false
alarm with any bad or weak finding.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from planted_tasks import FINDINGS, KINDS, write_planted

from harbortrainer.cli import main as harbortrainer
from harbortrainer.tasks.verdict import Verdict


def main() -> None:
    """Run the audit and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--include", default="*", help="Shell pattern for task names.")
    parser.add_argument("--parallel", default="2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="harbortrainer-planted-") as folder:
        os.chdir(folder)
        kinds = write_planted(Path(folder), options.seed)
        given = ["--benchmark", "benchmark", "--cheats", "none", "--json", "audit.json", "--parallel", options.parallel]
        started = time.monotonic()
        harbortrainer(["tasks", "audit", "tasks", "--include", options.include, *given])
        took = time.monotonic() - started
        verdicts = [Verdict.model_validate(row) for row in json.loads(Path("audit.json").read_text())["tasks"]]
    print_table(kinds, verdicts)
    trials = sum(len(verdict.trials) for verdict in verdicts)
    print(f"\n{trials} trials, {took:.0f} s, seed {options.seed}", file=sys.stderr)


def print_table(kinds: dict[str, str], verdicts: list[Verdict]) -> None:
    """Print a Markdown table of the kinds, and the missed and falsely reported tasks."""
    count = Counter(kinds[verdict.task] for verdict in verdicts)
    found = Counter(kinds[verdict.task] for verdict in verdicts if is_named(verdict, kinds[verdict.task]))
    print("\n| planted | tasks | found |\n|---|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {count[kind]} | {found[kind]} |")
    planted, caught = count.total() - count[""], found.total() - found[""]
    print(f"| **all** | {planted} | {caught} |\n| clean | {count['']} | {found['']} (false) |\n")
    for verdict in verdicts:
        if is_named(verdict, kinds[verdict.task]) != bool(kinds[verdict.task]):
            print(f"wrong: {verdict.task}: {[finding.what for finding in verdict.findings]}")


def is_named(verdict: Verdict, kind: str) -> bool:
    """Whether a bad or weak finding names the planted defect; for a clean task, whether there is any."""
    findings = [finding.what for finding in verdict.findings if finding.severity != "note"]
    return any(re.search(FINDINGS[kind], what) for what in findings) if kind else bool(findings)


if __name__ == "__main__":
    main()
