"""Says what is being loaded, since the libraries that trials and learners need take seconds to import."""

import sys


def loading(what: str, module: str) -> None:
    """One line before a slow import; none when `module` is there already."""
    if module not in sys.modules:
        print(f"loading {what} ...", flush=True)
