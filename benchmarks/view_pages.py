"""Measure time and memory of the dashboard's pages for a large run.

    python benchmarks/view_pages.py [--trials 100000] [--run FOLDER]

Writes a synthetic run as `run_index.py` does, or takes an existing one, and indexes it. Then a new process requests
each page twice: the first request includes imports and templates. Prints CPU seconds, which exclude the load of other
programs. A synthetic run is deleted at the end.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run_index import write_synthetic_run

from harbortrainer.view.run_folders import open_store

PAGES = (
    *("/", "/tasks", "/tasks?kind=eval&sort=gain", "/trials", "/trials?page=1500", "/trials?sort=-tokens"),
    *("/trials?outcome=turn_limit&reward=0..0.5&step=10..50&sort=reward", "/trial/{trial}", "/group/{group}", "/live"),
)


def ask(folder: Path) -> None:
    """Open the run in this process and request its pages."""
    began = time.process_time()
    from starlette.testclient import TestClient

    from harbortrainer.view.queries import TrialFilter
    from harbortrainer.view.server import Site

    store = open_store(folder)
    site = Site(store)
    site.preload()
    client = TestClient(site.app(), base_url="http://localhost")
    print(f"open, imports included: {time.process_time() - began:.2f} s")
    (newest, *_), total = store.find(TrialFilter(kind="train"))
    for page in PAGES:
        address, took = page.format(trial=newest.trial, group=newest.group), []
        for _ in range(2):
            began = time.process_time()
            answer = client.get(address)
            took.append(time.process_time() - began)
            assert answer.status_code == 200, address
        print(f"  {page:68} {took[0]:6.3f} {took[1]:6.3f} s, {len(answer.content) / 1000:4.0f} kB")
    print(f"{total} training trials, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB at most")


def main() -> None:
    """Write the run, index it, and request its pages in a new process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ask:
        return ask(chosen.ask)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = chosen.run or Path(scratch) / "run"
        if chosen.run is None:
            write_synthetic_run(folder, chosen.trials)
        began = time.process_time()
        open_store(folder)
        print(f"indexed: {time.process_time() - began:.2f} s", flush=True)
        subprocess.run([sys.executable, __file__, "--ask", str(folder)], check=True)
    return None


if __name__ == "__main__":
    main()
