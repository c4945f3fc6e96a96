"""Every pass over a graph, in order. What a fact means: numadist/graph/facts.py.

A model is captured (CAPTURE; for generation also STEP) and planned; sharding/apply.py makes one rank's graph of it. For
compilation that graph goes through INFERENCE, or for generation through PACKED and, in a copy that decodes, DECODE.
"""

from numadist.graph import facts
from numadist.graph.canonical import order_canonically
from numadist.graph.cleanup import drop_guards, drop_noise, drop_unused_parameters, split_tiling_slices
from numadist.graph.functionalize import functionalize
from numadist.graph.grad_modes import inline_grad_modes
from numadist.graph.passes import Pass
from numadist.graph.simplify import fold_gelu, resolve_masks
from numadist.lowering import facts as lowered
from numadist.lowering.attention import (
    use_grouped_attention,
    write_attention,
    write_attention_of_one_query,
)
from numadist.lowering.linears import write_linears
from numadist.lowering.one_token_attention import use_one_token_attention
from numadist.lowering.packing import (
    pack_halves,
    pack_linears,
    use_skinny_linears,
)

_EXPORTED = (facts.SIZED,)

CAPTURE = (
    Pass(
        inline_grad_modes,
        "regions without gradients become plain ops",
        leaves=(facts.NO_REGIONS,),
        keeps=_EXPORTED,
    ),
    Pass(drop_noise, "assertions and casts hide what is linear", _EXPORTED, (facts.NO_NOISE,), _EXPORTED),
    Pass(split_tiling_slices, "slices that tile a dim become the split they are", _EXPORTED, keeps=_EXPORTED),
    Pass(resolve_masks, "masks that depend on no input are named", (facts.NO_NOISE,), keeps=_EXPORTED),
    Pass(
        fold_gelu, "GELU spelled out becomes one op", (facts.NO_NOISE,), (facts.NO_SPELLED_GELU,), _EXPORTED
    ),
    Pass(functionalize, "writes into fresh tensors become values", _EXPORTED, (facts.FUNCTIONAL,), _EXPORTED),
    # Last: schemas name nodes, and ranks compare them.
    Pass(
        order_canonically,
        "one order and naming, whatever order it was traced in",
        (facts.NO_NOISE, facts.FUNCTIONAL),
        (facts.CANONICAL,),
        (facts.SIZED, facts.NO_NOISE, facts.FUNCTIONAL, facts.NO_SPELLED_GELU),
    ),
)

# One step of generation, captured.
STEP = (
    Pass(drop_guards, "a rank passes its part of the KV tensors", leaves=(facts.ANY_SHAPE,), keeps=_EXPORTED),
    Pass(use_grouped_attention, "no copy of the cache", _EXPORTED, (facts.KV_NOT_REPEATED,), _EXPORTED),
)

# One rank's graph in which nothing repeats, for Inductor with frozen weights.
INFERENCE = (
    Pass(write_linears, "products as Inductor packs and fuses them", leaves=(lowered.LINEARS_WRITTEN,)),
    Pass(pack_halves, "16-bit weights that no library multiplies fast", keeps=(lowered.LINEARS_WRITTEN,)),
    Pass(write_attention, "our attention where it is faster", keeps=(lowered.LINEARS_WRITTEN,)),
)

# One rank's graph with weights packed once: a model of layers, or a step for reading prompts and for decoding.
PACKED = (
    Pass(write_linears, "products as oneDNN packs them", leaves=(lowered.LINEARS_WRITTEN,)),
    Pass(pack_linears, "linear layers on packed weights", (lowered.LINEARS_WRITTEN,), (lowered.PACKED,)),
    Pass(drop_unused_parameters, "plain weights are freed", (lowered.PACKED,)),
    Pass(write_attention, "our attention where it is faster", keeps=(lowered.PACKED,)),
)

# A copy of the packed step that is called with one token a row.
DECODE = (
    Pass(write_attention_of_one_query, "our attention of single queries", (lowered.PACKED,)),
    Pass(use_one_token_attention, "plain loops for what is left", leaves=(lowered.NO_SDPA,)),
    Pass(use_skinny_linears, "our product of few rows on oneDNN's weights", (lowered.PACKED,)),
)
