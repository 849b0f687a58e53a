"""python -m portable_flash.bench: the same as `portable-flash bench`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
