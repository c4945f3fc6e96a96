"""Become a peer of decode.py on all its cores: `python decode_peer.py CPUS PYTHON SCRIPT`.

numarun pins a rank and binds its memory before Python starts, and a peer must not inherit that: some libraries look at
the CPUs they may use when they are imported.
"""

import os
import sys

from numadist import binding
from numadist.topology.cpuset import parse_list

if __name__ == "__main__":
    binding.bind_cpus(parse_list(sys.argv[1]))
    binding.bind_memory("local", [])
    os.execv(sys.argv[2], sys.argv[2:])
