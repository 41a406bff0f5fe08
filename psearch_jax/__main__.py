"""`python -m psearch_jax` is `psearch`."""

import sys

from psearch_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
