"""One order and one naming of a captured graph, whatever order the model was traced in.

Ranks must plan alike, but a model may do independent things in the order of a Python set, which differs from process
to process (Gemma 3 in transformers 5 makes the rotary tables of its layer types so).
"""

from collections.abc import Iterable, Iterator

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def order_canonically(gm: GraphModule) -> None:
    """Put every node just before its first use, as the output needs them, and name nodes in that order.

    Inputs and checks of inputs stay in front. A graph that writes into tensors is left alone: its order has a meaning.
    """
    gm.graph = _ordered(gm.graph)


def canonical_names(gm: GraphModule) -> list[str]:
    """Names of the graph's nodes as order_canonically would have them."""
    return [node.name for node in _ordered(gm.graph).nodes]


def _ordered(graph: Graph) -> Graph:
    nodes = list(graph.nodes)
    if any(_writes(node) for node in nodes):
        return graph
    output = nodes[-1]
    needed = set(_by_need([output]))
    front = [node for node in nodes if node.op == "placeholder"]
    front += [node for node in nodes if node not in needed and node.op != "placeholder"]
    ordered = Graph()
    ordered.set_codegen(graph._codegen)
    made: dict[Node, Node] = {}
    for node in _by_need([*front, output]):
        args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = ordered.create_node(node.op, node.target, args, kwargs, _plain_name(node), node.type)
        made[node].meta = dict(node.meta)
    return ordered


def _by_need(roots: Iterable[Node]) -> Iterator[Node]:
    """The roots in their order, each behind what it needs and has not come yet."""
    done: set[Node] = set()
    todo = list(roots)[::-1]
    while todo:
        node = todo[-1]
        missing = [source for source in node.all_input_nodes if source not in done]
        if missing:
            todo += missing[::-1]
            continue
        todo.pop()
        if node not in done:
            done.add(node)
            yield node


def _plain_name(node: Node) -> str | None:
    """As torch.export names it: the input's own name, or the operator's without its overload."""
    if node.op == "placeholder":
        return node.name
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else packet.__name__


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
