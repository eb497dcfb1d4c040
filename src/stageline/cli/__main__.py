"""``python -m stageline.cli``: the same as ``python -m stageline``."""

import sys

from stageline.cli import main

if __name__ == "__main__":
    sys.exit(main())
