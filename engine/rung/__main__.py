"""`python -m rung`: the same as the `rung` command."""

import sys

from rung.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
