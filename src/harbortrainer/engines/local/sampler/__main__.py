"""`python -m harbortrainer.engines.local.sampler --model X --port N`: the embedded sampler as a server of its own."""

import argparse
import sys

from harbortrainer.engines.local.sampler.serve import serve
from harbortrainer.errors import EXIT_USER_ERROR, UserError


def main() -> int:
    """Parses, serves until Ctrl-C, returns the exit code."""
    parser = argparse.ArgumentParser(prog="harbortrainer.engines.local.sampler", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal LM")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-name", default=None, help="the name requests use; --model when left out")
    parser.add_argument("--adapter", default=None, help="a LoRA adapter to start with")
    try:
        return serve(**vars(parser.parse_args()))
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
