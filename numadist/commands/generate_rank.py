"""Start of one rank of `numadist generate`."""

import gc
import sys


def main() -> int:
    """Returns the exit code."""
    # What a start makes stays; looking for garbage in it would take a quarter of its time.
    gc.disable()
    from numadist.commands.generate_text import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
