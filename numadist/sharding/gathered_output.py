"""Layers that no block takes, computed by parts: each rank makes some output columns, and all get all of them.

Every rank needs the whole output of such a layer: the one KV head that several ranks share, a layer before a norm.
Computed whole by every rank it costs as much as on one; gathering its output costs far less than computing it.
"""

import math
from collections.abc import Iterable

from torch.fx import Node

from numadist.graph import query
from numadist.graph.query import Contraction, Dependencies, aten
from numadist.sharding.placement import Shard
from numadist.sharding.schema import GATHERED_OUTPUT
from numadist.sharding.vocabulary import RowSplit, cut_rows

# A gather in a compiled graph takes some 10 us, and a core about 100 us for this product.
MIN_FLOPS = 2e7


def plan_gathered_outputs(
    deps: Dependencies, layers: Iterable[Contraction], num_ranks: int
) -> list[RowSplit]:
    """One plan for every layer worth it. Layers of dynamic size are left alone: one row is not worth a gather."""
    plans = []
    for layer in layers:
        params = _params(deps, layer, num_ranks) if _is_worth_it(layer) else None
        if params is not None:
            plans.append(RowSplit([], [layer.node], params, kind=GATHERED_OUTPUT))
    return plans


def _is_worth_it(layer: Contraction) -> bool:
    sizes = query.shape(layer.node)
    if layer.node.target is not aten.linear.default or not all(map(query.is_static, sizes)):
        return False
    return bool(2.0 * math.prod(sizes) * layer.size >= MIN_FLOPS)


def _params(deps: Dependencies, layer: Contraction, num_ranks: int) -> dict[str, Shard] | None:
    """Rows of weight and bias per rank; None if something else reads them, or a rank would get none."""
    rows = cut_rows(query.shape(layer.weight)[0], num_ranks)
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    if rows is None or not all(_is_own(deps, p, layer.node) for p in parameters):
        return None
    return {str(p.target): Shard({0: rows}) for p in parameters}


def _is_own(deps: Dependencies, parameter: Node, user: Node) -> bool:
    return (
        deps.is_parameter(parameter)
        and deps.same_parameter(parameter) == [parameter]
        and list(parameter.users) == [user]
    )
