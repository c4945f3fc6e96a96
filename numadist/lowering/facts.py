"""Facts about one rank's graph on its way to fast kernels; see numadist/graph/facts.py."""

from torch.fx import GraphModule

from numadist.graph.passes import Fact
from numadist.graph.sdpa import SDPA
from numadist.lowering.linears import linear_between_views
from numadist.lowering.packing import packable_linear


def _unwritten(gm: GraphModule) -> str:
    return next((f"{n.name}: view, addmm, view" for n in gm.graph.nodes if linear_between_views(n)), "")


def _unpacked(gm: GraphModule) -> str:
    found = (n.name for n in gm.graph.nodes if packable_linear(gm, n) is not None)
    return next((f"{name}: its weight is not packed" for name in found), "")


def _attention(gm: GraphModule) -> str:
    return next((n.name for n in gm.graph.nodes if n.target is SDPA), "")


LINEARS_WRITTEN = Fact("no linear layer between views", _unwritten)
PACKED = Fact("linear layers have packed weights", _unpacked)
NO_SDPA = Fact("no attention of torch's", _attention)
