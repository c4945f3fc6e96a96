"""Vocabulary split: embedding tables and output heads, cut over the vocabulary with one layout for both.

A rank looks up the tokens of its rows and gives zeros for the others: the sum over ranks is the embedding. The head
computes the logits of its rows: they are gathered along the last dim. Tied weights need nothing more, as both sides
want the same rows.
"""

import math
from dataclasses import dataclass

from torch.fx import Node

from numadist.graph import query
from numadist.graph.query import Contraction, Dependencies, aten
from numadist.sharding.placement import ALIGNMENT, DimShard, Shard, equal_chunks

# A smaller table (positions, token types, a two-way classifier) costs more to reduce than to keep whole.
MIN_SHARE_OF_MODEL = 0.02
# A vocabulary is much longer than it is wide; a square last layer is no head worth gathering.
MIN_ROWS_PER_COLUMN = 4


@dataclass
class RowSplit:
    """Weights cut over their rows (tokens of a table, outputs of a layer): the lookups and layers that use them.

    A lookup gives a partial sum; a head is a layer whose output is gathered.
    """

    lookups: list[Node]
    heads: list[Node]
    params: dict[str, Shard]
    kind: str = "vocabulary"


def cut_rows(size: int, num_ranks: int) -> DimShard | None:
    """Rows per rank, aligned where that leaves each rank some; None if a rank gets none."""
    return equal_chunks(size, num_ranks, ALIGNMENT) or equal_chunks(size, num_ranks)


def plan_vocabulary(
    deps: Dependencies, candidates: dict[Node, Contraction], num_ranks: int
) -> list[RowSplit]:
    """Split every large table whose only uses are lookups and heads.

    candidates: linear layers that no block took and whose output is the model's output.
    """
    total = sum(p.numel() for p in {id(p): p for p in deps.parameters.values()}.values())
    plans = []
    for node in deps.nodes:
        if not deps.is_parameter(node) or deps.same_parameter(node) != [node]:
            continue
        size = query.shape(node)
        if len(size) != 2 or size[0] < MIN_ROWS_PER_COLUMN * size[1]:
            continue
        if math.prod(size) >= MIN_SHARE_OF_MODEL * total:
            plan = _plan_table(deps, node, candidates, num_ranks)
            if plan is not None:
                plans.append(plan)
    return plans


def _plan_table(
    deps: Dependencies, weight: Node, candidates: dict[Node, Contraction], num_ranks: int
) -> RowSplit | None:
    lookups, heads = [], []
    rows = cut_rows(query.shape(weight)[0], num_ranks)
    if rows is None:
        return None
    params = {str(weight.target): Shard({0: rows})}
    for user in weight.users:
        head = candidates.get(user)
        if user.target is aten.embedding.default and user.args[0] is weight:
            if any(
                user.args[3:]
            ):  # scale_grad_by_freq and sparse count tokens, of which others look like ours
                return None
            lookups.append(user)
        elif head is not None and head.weight is weight and head.weight_k_dim == 1:
            heads.append(user)
            if head.bias is not None:
                if not deps.is_parameter(head.bias) or list(head.bias.users) != [user]:
                    return None
                params[str(head.bias.target)] = Shard({0: rows})
        else:
            return None
    return RowSplit(lookups, heads, params)
