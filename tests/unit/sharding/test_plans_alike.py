"""A plan depends on the model only: not on addresses, hash seeds or what else is in memory."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

FOLDER = Path(__file__).parent
LIMIT_S = 600

PLAN = """
import hashlib, json, random, sys
import numadist, zoo
ballast = [bytes(random.Random(int(sys.argv[1])).randrange(1, 5000)) for _ in range(2000)]
del ballast[::3]
found = {}
for name in sys.argv[2:]:
    model, inputs = zoo.make(name), zoo.ZOO[name].inputs()
    schema = numadist.plan(model, inputs, 3)
    text = schema.to_json() + numadist.explain(model, inputs, 3)
    found[name] = hashlib.blake2b(text.encode()).hexdigest()
print(json.dumps(found))
"""


def plans(seed: int, names: list[str]) -> dict[str, str]:
    environ = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PLAN, str(seed), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(names: list[str], num_processes: int) -> None:
    seeds = random.Random(0).sample(range(1, 2**32), num_processes)
    first, *others = (plans(seed, names) for seed in seeds)
    for seed, other in zip(seeds[1:], others, strict=True):
        different = [name for name in names if other[name] != first[name]]
        assert not different, f"hash seeds {seeds[0]} and {seed} plan {different} in two ways"


@pytest.mark.parametrize(
    "num_processes", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)]
)
def test_every_architecture_is_planned_alike_in_every_process(num_processes):
    import zoo

    check(list(zoo.ZOO), num_processes)
