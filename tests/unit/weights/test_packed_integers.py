"""AWQ, GPTQ and compressed-tensors, packed here as their documents say, against scale * (code - zero)."""

import pytest
import torch
from packed_layers import layer
from safetensors.torch import save_file

from numadist.errors import ShardError
from numadist.kernels.quantized import Scales
from numadist.sharding.placement import DimShard, Shard
from numadist.weights.packed_integers import coded, scheme_of, take_apart
from numadist.weights.safetensors import SafetensorsCheckpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def compressed(form, bits, group=64, **options):
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    weights |= options
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }


CASES = [
    (GPTQ, {"method": "gptq"}),
    (GPTQ, {"method": "gptq", "symmetric": True}),
    (GPTQ | {"desc_act": True}, {"method": "gptq", "act_order": True}),
    (
        GPTQ | {"desc_act": True},
        {"method": "gptq", "act_order": True, "symmetric": True, "num_in": 200, "group": 40},
    ),
    (GPTQ | {"bits": 8}, {"method": "gptq", "bits": 8, "symmetric": True}),
    (GPTQ | {"checkpoint_format": "gptq_v2"}, {"method": "gptq", "offset": 0}),
    (AWQ, {"method": "awq"}),
    (AWQ | {"group_size": 32}, {"method": "awq", "group": 32}),
    (AWQ | {"group_size": -1}, {"method": "awq", "group": 256}),
    (AWQ | {"group_size": 128}, {"method": "awq", "num_in": 192, "group": 128}),
    (compressed("pack-quantized", 4), {"method": "pack-quantized", "symmetric": True}),
    (compressed("pack-quantized", 4, 128, symmetric=False), {"method": "pack-quantized", "group": 128}),
    (
        compressed("pack-quantized", 4, actorder="group"),
        {"method": "pack-quantized", "symmetric": True, "act_order": True},
    ),
    (compressed("pack-quantized", 8), {"method": "pack-quantized", "bits": 8, "symmetric": True}),
    (
        compressed("pack-quantized", 4, 128),
        {"method": "pack-quantized", "symmetric": True, "num_in": 192, "group": 128},
    ),
    (
        compressed("int-quantized", 8, None),
        {"method": "int-quantized", "bits": 8, "symmetric": True, "group": 256},
    ),
    (
        compressed("int-quantized", 8, 128),
        {"method": "int-quantized", "bits": 8, "symmetric": True, "num_in": 320, "group": 128},
    ),
]


@pytest.mark.parametrize(("config", "how"), CASES)
def test_codes_stand_for_the_numbers_of_the_format(config, how):
    pieces, weights = layer(**how)
    parts = take_apart(scheme_of(config, "m"), pieces, "layer")
    assert torch.equal(parts.widened(), weights)
    codes = coded(parts, None)
    assert torch.equal(codes.widened(), weights)
    chosen = torch.tensor([15, 2, 9])
    assert torch.equal(coded(parts, chosen).widened(), weights[chosen])
    assert (codes.kind is Scales.F16) == bool(how.get("symmetric"))
    part = codes.inputs([(32, 70), (130, 192)])
    assert torch.equal(part.widened(), torch.cat([weights[:, 32:70], weights[:, 130:192]], 1))


@pytest.mark.parametrize(("config", "how"), CASES)
def test_a_checkpoint_gives_codes_and_widened_slices(config, how, tmp_path):
    pieces, weights = layer(**how)
    pieces = {f"a.{name}": tensor for name, tensor in pieces.items()}
    save_file(pieces | {"b.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, scheme=scheme_of(config, "m"))
    assert sorted(checkpoint.names()) == ["a.weight", "b.weight"]
    assert checkpoint.read_codes("b.weight", (3,), False, None) is None
    size = weights.shape[1]
    seen = checkpoint.read_codes("a.weight", (16, size), False, ((0, 3), (8, 10)))
    assert torch.equal(seen.widened(), torch.cat([weights[:3], weights[8:10]]))
    shard = Shard({1: DimShard((((0, 40),), ((40, size),)))})
    out = torch.empty(16, size - 40)
    checkpoint.read_into(out, "a.weight", shard, 1)
    assert torch.equal(out, weights[:, 40:])
    with pytest.raises(ShardError, match=r"a.weight has outputs and inputs .* parameter is \(7, 7\)"):
        checkpoint.read_codes("a.weight", (7, 7), False, None)


def test_without_an_index_of_groups_the_config_says_how_long_they_are():
    pieces, weights = layer("gptq", num_in=192, group=128)
    pieces.pop("g_idx")
    config = GPTQ | {"group_size": 128}
    assert torch.equal(take_apart(scheme_of(config, "m"), pieces, "layer").widened(), weights)
    pieces, _ = layer("gptq", num_in=200, group=96)
    pieces.pop("g_idx")
    with pytest.raises(ShardError, match=r"layer: .* 3 scales for 200 inputs, groups of \[64\]"):
        take_apart(scheme_of(GPTQ, "m"), pieces, "layer")


def test_scales_that_f16_does_not_hold_leave_the_layer_to_be_widened():
    pieces, _ = layer("int-quantized", bits=8, symmetric=True, group=256)
    pieces["weight_scale"] = torch.rand(16, 1) + 1e-9
    parts = take_apart(scheme_of(compressed("int-quantized", 8, None), "m"), pieces, "layer")
    assert coded(parts, None) is None
    assert torch.equal(parts.widened(), pieces["weight"].float() * pieces["weight_scale"])


def test_one_scale_of_an_output_or_of_the_layer_may_be_kept_flat():
    pieces, weights = layer("int-quantized", bits=8, symmetric=True, group=256)
    scheme = scheme_of(compressed("int-quantized", 8, None), "m")
    flat = take_apart(scheme, pieces | {"weight_scale": pieces["weight_scale"].flatten()}, "layer")
    assert torch.equal(flat.widened(), weights)
    one = take_apart(scheme, pieces | {"weight_scale": torch.tensor([0.5])}, "layer")
    assert torch.equal(one.widened(), 0.5 * pieces["weight"])


CHANGES = {
    "taken away": lambda t: None,
    "without a row": lambda t: t[:-1],
    "without all rows": lambda t: t[:0],
    "without a column": lambda t: t[..., :-1],
    "without all columns": lambda t: t[..., :0],
    "twice": lambda t: torch.cat([t, t]),
    "flat": lambda t: t.flatten(),
    "turned": lambda t: t.t().contiguous() if t.dim() == 2 else t[None],
    "other numbers": lambda t: t.to(torch.float64 if t.is_floating_point() else torch.float32),
    "wider numbers": lambda t: t if t.is_floating_point() else t.to(torch.int64),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("config", "how"), CASES)
def test_damaged_tensors_are_refused_or_mean_the_same(config, how, change):
    """Or make a layer of another size, which is none of the model's."""
    pieces, weights = layer(**how)
    for name, tensor in pieces.items():
        changed = CHANGES[change](tensor)
        if changed is not None and changed.shape == tensor.shape and changed.dtype is tensor.dtype:
            continue
        seen = {key: value for key, value in pieces.items() if key != name}
        if changed is not None:
            seen[name] = changed
        try:
            parts = take_apart(scheme_of(config, "m"), seen, "layer")
        except ShardError:
            continue
        assert parts.codes.shape != weights.shape or torch.equal(parts.widened(), weights), name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (AWQ | {"version": "gemv"}, "AWQ of 4 bits, version gemv"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits, format gptq"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ of 4 bits, format marlin"),
        (compressed("float-quantized", 8), "compressed-tensors of format float-quantized"),
        (compressed("pack-quantized", 2), "compressed-tensors of format pack-quantized, \\['2'\\] bits"),
    ],
)
def test_a_format_that_is_not_read_is_named(config, named):
    with pytest.raises(ShardError, match=f"m is quantized by {named}"):
        scheme_of(config, "m")


def test_tensors_that_do_not_belong_together_name_their_layer():
    scheme = scheme_of(GPTQ, "m")
    for change in (
        lambda p: p.pop("scales"),
        lambda p: p.update(scales=p["scales"][:2]),
        lambda p: p.update(scales=p["scales"][:, :5]),
        lambda p: p.update(qzeros=p["qzeros"][:1]),
        lambda p: p.update(g_idx=p["g_idx"] + 1),
        lambda p: p.update(g_idx=p["g_idx"][:9]),
        lambda p: (p.pop("g_idx"), p.update(scales=p["scales"][:0], qzeros=p["qzeros"][:0])),
    ):
        pieces, _ = layer("gptq")
        change(pieces)
        with pytest.raises(ShardError, match="layer: its quantized tensors do not belong together"):
            take_apart(scheme, pieces, "layer")
    pieces, _ = layer("gptq")
    pieces["scales"][0, 0] = torch.nan
    with pytest.raises(ShardError, match="layer has scales that are no numbers"):
        take_apart(scheme, pieces, "layer")
