"""Recorded machines: the /sys and /proc dumps of tests/machines, unpacked once a session."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

DUMPS = [
    "128arm-2pa2n8cluster4co",
    "16amd64-8n2c-cpusets",
    "256ppc-8n8s4t",
    "32intel64-2p8co2t+8ve",
    "64amd64-4s2n4ca2co",
    "64intel64-fakeKNL-SNC4-hybrid",
    "96em64t-4no4pa3ca2co",
    "memorysidecaches",
    "nvidiagpunumanodes",
    "offline-cpu0-node0",
]
MACHINES = Path(__file__).resolve().parents[1] / "machines"


@dataclass(frozen=True)
class Dump:
    """root: a directory that holds sys/ (and proc/); expected: facts about it, and the placement wanted."""

    root: Path
    expected: dict

    @property
    def options(self) -> list[str]:
        """What numarun needs to see this machine."""
        words = ["--sysfs", str(self.root)]
        if "allowed" in self.expected:
            allowed = self.expected["allowed"]
            words += ["--allowed-cpus", allowed["cpus"], "--allowed-mems", allowed["mems"]]
        return words


@pytest.fixture(scope="session")
def dump(tmp_path_factory):
    """Function from the name of a recorded machine to its Dump."""
    found: dict[str, Dump] = {}

    def unpack(name: str) -> Dump:
        folder = MACHINES / name
        if name not in found:
            target = tmp_path_factory.mktemp(name)
            subprocess.run(["tar", "-xzf", folder / "fsroot.tar.gz", "-C", target], check=True)
            found[name] = Dump(target / "fsroot", json.loads((folder / "expected.json").read_text()))
        return found[name]

    return unpack


@pytest.fixture(params=DUMPS)
def recorded(request, dump):
    """Every recorded machine in turn."""
    return dump(request.param)


@pytest.fixture(autouse=True, scope="session")
def checked_passes():
    """Every pass over a graph is held against what it says of itself."""
    from numadist.graph.passes import checking

    with checking():
        yield
