"""`python evaluate.py` is `reformax evaluate`, from a checkout: see reformax/cli/evaluate.py."""

import sys

from reformax.cli import errors
from reformax.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
