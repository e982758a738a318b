"""Search public task repositories for readable answers and graders, and write the report of docs/audit/.

    python benchmarks/public_audit.py MIRRORS --out docs/audit
    python benchmarks/public_audit.py MIRRORS --out docs/audit --trials AUDITS

MIRRORS has git directories named OWNER+NAME/repo. Nothing of the tasks is run: this is the static part of
`harbortrainer tasks audit`. The report names repositories, commits, tasks and files, and has no text of theirs.
Its parts "Read by hand" and "Trials" stay when it is written again.

The second command adds trials to the report instead. AUDITS has files OWNER+NAME/audit.json, which
`harbortrainer tasks audit --json` wrote. Their rewards go to trials.json, and the page's table of trials is renewed.
"""

import argparse
import json
import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypedDict

from harbortrainer.errors import UserError
from harbortrainer.tar_filter import strict_filter
from harbortrainer.tasks.audit import read_files, static_findings
from harbortrainer.tasks.cheats import CHEATS, MUTANTS
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.verdict import Finding

INTRODUCTION = """# Audit of public tasks

The static part of [`harbortrainer tasks audit`](../check-tasks.md#audit) on public repositories: answers and graders in
files of the image, and answers in the instruction. The search is textual. `audit.json` beside this page has all
findings. Trials of the audit (guesses, mutants, cheats) were run on a part of the tasks: see [Trials](#trials).

"""
BY_HAND = "\n## Read by hand\n"
TABLE_OF_TRIALS = re.compile(r"(\| repository \| commit \| tasks \| not built .*\n\|[-|]+\|\n)(?:\|.*\n)*")

type TaskRewards = dict[str, list[float | str]]
"""The rewards of a task's trials by agent: `oracle`, `nop`, a cheat, a guess or a mutant."""


class RewardSet(TypedDict):
    """A repository's object of trials.json."""

    repository: str
    commit: str
    tasks: dict[str, TaskRewards]


@dataclass(frozen=True)
class AuditedSet:
    """The findings on the tasks of one repository."""

    repository: str
    commit: str
    unreadable: int
    """Tasks that cannot be read, and copies of others."""
    tasks: dict[str, list[Finding]]

    @property
    def weak(self) -> dict[str, str]:
        """The weak findings on each task that has one."""
        found = {name: [f.what for f in findings if f.severity == "weak"] for name, findings in self.tasks.items()}
        return {name: "; ".join(whats) for name, whats in found.items() if whats}


def main() -> None:
    """Audit each repository and write audit.json and index.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirrors", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=Path)
    options = parser.parse_args()
    if options.trials:
        return add_trials(options.mirrors, options.trials, options.out)
    sets = [one for mirror in sorted(options.mirrors.glob("*+*/repo")) if (one := audit(mirror)).tasks]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "audit.json").write_text(json.dumps([as_json(one) for one in sets], indent=1) + "\n")
    report = options.out / "index.md"
    _, heading, by_hand = (report.read_text() if report.exists() else "").partition(BY_HAND)
    report.write_text(page(sets) + heading + by_hand)


def audit(mirror: Path) -> AuditedSet:
    """Audit the tasks at a repository's newest stored commit."""
    skipped: list[UserError] = []
    with tempfile.TemporaryDirectory(prefix="harbortrainer-public-") as folder:
        # Level 0 leaves out the refused members, such as links to absolute paths.
        with tarfile.open(fileobj=BytesIO(git(mirror, "archive", "HEAD")), errorlevel=0) as archive:
            archive.extractall(folder, filter=strict_filter)
        try:
            tasks = load_folder(folder, skip=skipped.append)
        except UserError:
            tasks = []
        names = {task.key: "." if task.path == Path(folder).resolve() else task.name for task in tasks}
        findings = {names[task.key]: static_findings(read_files(task)) for task in tasks}
    commit = git(mirror, "rev-parse", "HEAD").decode().strip()
    return AuditedSet(mirror.parent.name.replace("+", "/", 1), commit, len(skipped), findings)


def git(mirror: Path, *words: str) -> bytes:
    """Run git in a repository; return its output, or an empty archive if objects are absent."""
    done = subprocess.run(["git", "-C", str(mirror), *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b"\0" * 1024


def as_json(one: AuditedSet) -> dict[str, object]:
    """Return a repository's object of audit.json; tasks without a finding have an empty list."""
    tasks = {name: [finding.model_dump() for finding in findings] for name, findings in one.tasks.items()}
    return {"repository": one.repository, "commit": one.commit, "unreadable": one.unreadable, "tasks": tasks}


def page(sets: list[AuditedSet]) -> str:
    """Return the Markdown report."""
    total, weak = sum(len(one.tasks) for one in sets), sum(len(one.weak) for one in sets)
    authors = len({one.repository.split("/")[0] for one in sets})
    lines = [f"{total} tasks of {authors} authors: {weak} have a finding.\n"]
    lines += ["| repository | commit | tasks | unreadable | with a finding |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.repository} | {one.commit[:12]} | {len(one.tasks)} | {one.unreadable} | {len(one.weak)} |"
        for one in sets
    ]
    lines += ["\n| task | finding |", "|---|---|"]
    lines += [f"| {one.repository}: {name} | {what} |" for one in sets for name, what in one.weak.items()]
    return INTRODUCTION + "\n".join(lines) + "\n"


def add_trials(mirrors: Path, audits: Path, out: Path) -> None:
    """Add the rewards of audits to trials.json, and write its table into the page."""
    file, page = out / "trials.json", out / "index.md"
    sets: dict[str, RewardSet] = {one["repository"]: one for one in json.loads(file.read_text())}
    for report in sorted(audits.glob("*+*/audit.json")):
        repository = report.parent.name.replace("+", "/", 1)
        commit = git(mirrors / report.parent.name / "repo", "rev-parse", "HEAD").decode().strip()
        tasks = rewards_of(report)
        if repository in sets and sets[repository]["commit"] == commit:
            tasks = sets[repository]["tasks"] | tasks
        if tasks:
            sets[repository] = {"repository": repository, "commit": commit, "tasks": dict(sorted(tasks.items()))}
    ordered = [sets[repository] for repository in sorted(sets)]
    file.write_text("[\n" + ",\n".join(map(reward_lines, ordered)) + "\n]\n")
    page.write_text(TABLE_OF_TRIALS.sub(lambda found: found[1] + trial_table(ordered), page.read_text()))


def rewards_of(report: Path) -> dict[str, TaskRewards]:
    """Return each task's rewards by agent, or outcomes where there is no reward; tasks without a trial are left out."""
    tasks: dict[str, TaskRewards] = {}
    for verdict in json.loads(report.read_text())["tasks"]:
        name = "." if verdict["task"] == report.parent.name else verdict["task"]
        for trial in verdict["trials"]:
            result = trial["outcome"] if trial["reward"] is None else trial["reward"]
            tasks.setdefault(name, {}).setdefault(trial["agent"], []).append(result)
    return tasks


def reward_lines(one: RewardSet) -> str:
    """Return a repository's part of trials.json: a line for each task."""
    head = json.dumps({key: one[key] for key in ("repository", "commit")})[:-1]
    lines = (f"  {json.dumps(name)}: {json.dumps(rewards)}" for name, rewards in one["tasks"].items())
    return f' {head}, "tasks": {{\n' + ",\n".join(lines) + "\n }}"


def trial_table(sets: list[RewardSet]) -> str:
    """Return the rows of the table of trials."""
    counts = [[sum(column) for column in zip(*map(kinds, one["tasks"].values()), strict=True)] for one in sets]
    rows = [(one["repository"], one["commit"][:12], *row) for one, row in zip(sets, counts, strict=True)]
    rows.append(("**all**", "", *(sum(column) for column in zip(*counts, strict=True))))
    return "".join(f"| {' | '.join(map(str, row))} |\n".replace("|  |", "| |") for row in rows)


def kinds(rewards: TaskRewards) -> tuple[bool, ...]:
    """Return for each column of the table whether the task counts in it."""
    built = rewards["oracle"] != ["sandbox_error"]
    solved = built and set(rewards["oracle"]) == {1.0}
    paid = {agent for agent, results in rewards.items() if solved and 1.0 in results}
    spoiled = any(agent.startswith("guessed-") or agent in MUTANTS for agent in paid)
    return True, not built, built and not solved, solved, bool(paid & set(CHEATS)), spoiled


if __name__ == "__main__":
    main()
