"""NUMA tensor parallelism inside one process: the approach of NUMA-Torch (arXiv 2611.07105), our control.

One persistent pinned thread group per node runs the same per-rank graphs as the multi-process path; partial sums are
added directly, as all of them are in one address space. Python's lock is shared, so many small ops run one after the
other: that is what this variant is here to show.
"""

from numadist.inprocess.model import InProcessModel, shard

__all__ = ["InProcessModel", "shard"]
