"""How long the pages of a large run take, and how much memory: opened and asked for in a process of its own.

    python benchmarks/view_pages.py [--trials 100000] [--run FOLDER]

makes a run up as `run_index.py` does, or takes one that is there, opens it once so that its index is made, and then in
a fresh process asks for each page twice: what the first one costs, imports and templates included, and what the next
ones do. CPU seconds, so that a busy machine does not count. Nothing is left.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run_index import made_up

from harbortrainer.view.folder_kind import open_store

PAGES = (
    *("/", "/tasks", "/tasks?kind=eval&sort=gain", "/trials", "/trials?page=1500", "/trials?sort=-tokens"),
    *("/trials?outcome=turn_limit&reward=0..0.5&step=10..50&sort=reward", "/trial/{trial}", "/group/{group}", "/stamp"),
)


def ask(folder: Path) -> None:
    """Open the run in this process and ask for its pages."""
    began = time.process_time()
    from starlette.testclient import TestClient

    from harbortrainer.view.trial_filter import TrialFilter
    from harbortrainer.view.web_app import Site

    store = open_store(folder)
    site = Site(store)
    site.get_ready()
    client = TestClient(site.app(), base_url="http://localhost")
    print(f"open, imports included: {time.process_time() - began:.2f} s")
    (newest, *_), total = store.found(TrialFilter(kind="train"))
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
    """Make the run, index it, and ask in a fresh process."""
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
            made_up(folder, chosen.trials)
        began = time.process_time()
        open_store(folder)
        print(f"indexed: {time.process_time() - began:.2f} s", flush=True)
        subprocess.run([sys.executable, __file__, "--ask", str(folder)], check=True)
    return None


if __name__ == "__main__":
    main()
