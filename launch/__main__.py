"""`python -m numadist.launch ...`: the same as `numarun ...`."""

import sys

from numadist.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
