"""`python -m src.train --config configs/harbor_8b.toml`: the `train` command, from a checkout."""

import sys
from pathlib import Path

if __package__ == "src":  # started from the root of a checkout, where the package is next to this file
    sys.path.insert(0, str(Path(__file__).parent))

from harbortrainer.entry import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
