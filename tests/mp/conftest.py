"""Worker pools for tests with several ranks; functions sent to them live in the test modules."""

import pytest
from pool import ranks


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}ranks")
def pool(request):
    """Two, then three ranks in one group of backend numa, shared by a module's tests."""
    with ranks(request.param) as started:
        yield started


@pytest.fixture(
    scope="module",
    params=[
        ("numa", 2),
        pytest.param(("numa", 3), marks=pytest.mark.slow),
        pytest.param(("gloo", 2), marks=pytest.mark.slow),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}ranks",
)
def group(request):
    """Ranks in one group of the given backend: what must work on ours and on gloo."""
    backend, world = request.param
    with ranks(world, backend) as started:
        yield started


@pytest.fixture(scope="module")
def numa_pair():
    """Two ranks on our backend: enough for what compiles, which is slow."""
    with ranks(2) as started:
        yield started
