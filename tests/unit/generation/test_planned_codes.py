"""Plans for weights that will be codes: what explain says, and the bytes that costs are reckoned with."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")
pytest.importorskip("gguf", reason="needs the extra `models`")

from lockstep import Board
from quantized_files import MIXED, without_memory, write

import numadist
from numadist import models
from numadist.costmodel.presets import PRESETS
from numadist.errors import ShardError
from numadist.pipeline.explain import param_bytes
from numadist.pipeline.stages import Site, capture, checkpoint_of, localize
from numadist.sharding.count_work import work_of
from numadist.sharding.schema import Schema

INPUTS = {"input_ids": torch.tensor([[5, 77, 1, 300, 9, 2]]), "use_cache": False}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "mixed.gguf"
    write(path, (dict.fromkeys(MIXED[0], "Q4_K"), dict.fromkeys(MIXED[0], "Q6_K")))
    return path


def test_bytes_are_those_that_ranks_hold_of_a_file(file):
    schema = numadist.plan(without_memory(), INPUTS, 2, weights=file, quantization="auto")
    for rank in range(2):
        captured = capture(without_memory(), INPUTS, None)
        checkpoint = checkpoint_of(file, without_memory())
        held = localize(captured, schema, Site(rank, Board(2).emitter(rank)), checkpoint, "auto").num_bytes
        assert param_bytes(schema.graph, schema, rank) == pytest.approx(held, rel=0.03)


def test_every_layer_is_named_with_its_layout(file):
    text = numadist.explain(without_memory(), INPUTS, 2, weights=file, quantization="auto")
    four, eight = (
        "4 bits, two factors per 32, scale and minimum per 256",
        "8 bits, factor per 16, scale per 256",
    )
    (line,) = [line for line in text.splitlines() if line.startswith("weights that are codes: ")]
    assert sorted(line.partition(": ")[2].split("; ")) == [
        f"14 x {four}",
        f"14 x {eight}",
        "2 x 8 bits, scale per 32",
    ]
    assert f"layers.0.mlp.up_proj.weight: dim 0 [0:384 | 384:768] (384+384); {four}\n" in text
    assert f"layers.1.mlp.up_proj.weight: dim 0 [0:384 | 384:768] (384+384); {eight}\n" in text
    assert "codes" not in numadist.explain(without_memory(), INPUTS, 2)


@pytest.mark.parametrize(("how", "per_weight"), [("int8", 8.5 / 8), ("int4", 5 / 8)])
def test_a_step_reads_the_bytes_of_codes(how, per_weight):
    model, inputs = models.workload("llama-tiny", 1, 4, torch.float32)
    captured = capture(model, inputs, None)
    plain, coded = (numadist.plan(model, inputs, 2, quantization=kind) for kind in (None, how))
    before, after = (
        [op.weight_bytes for op in work_of(captured.gm, schema).ops if op.kind == "linear"]
        for schema in (plain, coded)
    )
    wanted = [num_bytes / 4 * per_weight for num_bytes in before]
    wanted[-1] = before[-1] / 4 * 8.5 / 8  # the head
    assert after == pytest.approx(wanted)


def test_an_automatic_choice_reckons_with_them():
    model, inputs = models.workload("llama-tiny", 1, 1, torch.float32)
    options = {"ranks": "auto", "blocks": "auto", "profile": next(iter(PRESETS.values()))}
    plain, coded = (numadist.plan(model, inputs, **options, quantization=how) for how in (None, "int4"))
    whole = [
        next(c for c in schema.costs.candidates if c.num_ranks == 1).predicted_ms for schema in (plain, coded)
    ]
    assert whole[1] < whole[0]


def test_a_saved_plan_keeps_them():
    model, inputs = models.workload("llama-tiny", 1, 4, torch.float32)
    schema = numadist.plan(model, inputs, 2, quantization="int8")
    again = Schema.from_json(schema.to_json())
    assert again.codes == schema.codes
    assert "q_proj.weight: dim 0 [0:48 | 48:72] (48+24); 8 bits, scale per 32" in numadist.explain(again)
    assert "codes" not in numadist.plan(model, inputs, 2).to_json()


def test_what_is_not_offered_is_an_error():
    model, inputs = models.workload("llama-tiny", 1, 4, torch.float32)
    with pytest.raises(ShardError, match="quantization must be auto, int8, int4 or None, got 'int3'"):
        numadist.plan(model, inputs, 2, quantization="int3")
