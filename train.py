"""`python train.py` is `reformax train`, from a checkout: see reformax/cli/train.py."""

import sys

from reformax.cli import errors
from reformax.cli.train import main

if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
