"""`python generate.py` is `reformax generate`, from a checkout: see reformax/cli/generate.py."""

import sys

from reformax.cli import errors, streams
from reformax.cli.generate import main

if __name__ == "__main__":
    sys.exit(errors.exit_code(main, streams.Result))
