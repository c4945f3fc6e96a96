"""The lock-step harness of the sharding tests serves here too, and the packed layers of those of weights."""

import sys
from pathlib import Path

for folder in ("sharding", "weights"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))
