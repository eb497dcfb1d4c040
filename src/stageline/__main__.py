"""``python -m stageline``: the command line without an installed script."""

import sys

from stageline.cli import main

if __name__ == "__main__":
    sys.exit(main())
