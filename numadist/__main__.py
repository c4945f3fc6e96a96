"""`python -m numadist COMMAND`: the same as `numadist COMMAND`."""

import sys

from numadist.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
