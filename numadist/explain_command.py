"""`numadist explain MODEL`: how a model would be sharded, without starting a rank."""

import argparse
from collections.abc import Sequence

from numadist import models
from numadist.shard.explain import explain


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="numadist explain", description=__doc__)
    parser.add_argument(
        "model",
        help=f"{', '.join(models.NAMES)}, or module:function; function(batch=, seq=) returns (model, keyword inputs)",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args(argv)
    print(explain(*models.workload(options.model, options.batch, options.seq), options.ranks))
    return 0
