"""The reduction kernels of every ISA this CPU runs, against torch; and how a bad core is reported."""

import pytest
import torch

from numadist import _native
from numadist._native import Dtype, Op
from numadist.errors import NativeError

ISAS = _native.supported_isas()
LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65, 4097]
TORCH = {
    Dtype.F32: torch.float32,
    Dtype.F64: torch.float64,
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.I8: torch.int8,
    Dtype.U8: torch.uint8,
    Dtype.I16: torch.int16,
    Dtype.I32: torch.int32,
    Dtype.I64: torch.int64,
}
FLOATS = [Dtype.F32, Dtype.F64, Dtype.F16, Dtype.BF16]
INTEGERS = [d for d in TORCH if d not in FLOATS]


def reduce(isa, xs, dtype, op):
    """xs[0] op xs[1] op ... by a kernel, with a guard element behind the result."""
    guard = torch.ones((), dtype=xs[0].dtype)
    out = guard.repeat(xs[0].numel() + 1)
    _native.reduce_local(isa, out.data_ptr(), [x.data_ptr() for x in xs], xs[0].numel(), dtype, op)
    assert out[-1] == guard, f"{isa} wrote behind the end"
    return out[:-1]


def random(dtype, count, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)


def fold(xs, function):
    total = xs[0]
    for x in xs[1:]:
        total = function(total, x)
    return total


def accumulate(xs, function):
    """fold, with 16-bit floats widened for all steps and rounded once."""
    dtype = xs[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    return fold([x.to(wide) for x in xs], function).to(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_srcs", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", TORCH, ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Op.SUM, Op.PROD, Op.MIN, Op.MAX], ids=lambda o: o.name)
def test_reduction_equals_torch_in_source_order(isa, num_srcs, dtype, op):
    function = {Op.SUM: torch.add, Op.PROD: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}[op]
    for count in LENGTHS:
        xs = [random(TORCH[dtype], count, seed) for seed in range(num_srcs)]
        seen, wanted = reduce(isa, xs, dtype, op), accumulate(xs, function)
        assert torch.equal(seen, wanted), f"{count} elements: {seen} instead of {wanted}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_average_divides_before_the_one_rounding(isa, dtype):
    xs = [random(TORCH[dtype], 4097, seed) for seed in range(3)]
    wide = torch.float64 if dtype == Dtype.F64 else torch.float32
    wanted = (fold([x.to(wide) for x in xs], torch.add) / 3).to(TORCH[dtype])
    assert torch.equal(reduce(isa, xs, dtype, Op.AVG), wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_bit_reductions(isa, dtype):
    xs = [random(TORCH[dtype], 1000, seed) for seed in range(3)]
    for op, function in {
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }.items():
        assert torch.equal(reduce(isa, xs, dtype, op), fold(xs, function)), op.name


def special_values(dtype):
    """Every 16-bit pattern, or the corners of a wider type."""
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38], dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Op.SUM, Op.MAX], ids=lambda o: o.name)
def test_nan_infinity_and_every_16_bit_pattern(isa, dtype, op):
    x = special_values(TORCH[dtype])
    for other in (0.0, 1.0, 3e-8, float("inf"), float("nan")):
        y = torch.full_like(x, other)
        seen = reduce(isa, [x, y], dtype, op)
        wanted = accumulate([x, y], torch.add if op == Op.SUM else torch.maximum)
        if isa in ("amx_bf16", "avx512_bf16") and dtype == Dtype.BF16 and op == Op.SUM:
            # The instruction flushes denormal results; everything else is bit for bit.
            wanted = torch.where(wanted.abs() < torch.finfo(torch.bfloat16).tiny, 0.0, wanted)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_elements", [0, 1, 31, 32, 33, 4097])
def test_reduce_bf16_matches_float32_sum(isa, num_elements):
    xs = [random(torch.bfloat16, num_elements, seed) for seed in range(4)]
    wanted = fold([x.float() for x in xs], torch.add).bfloat16()
    assert torch.equal(reduce(isa, xs, Dtype.BF16, Op.SUM), wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_bool_sum_is_or_and_product_is_and(isa):
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    assert reduce(isa, [x, y], Dtype.BOOL, Op.SUM).tolist() == [False, True, True, True]
    assert reduce(isa, [x, y], Dtype.BOOL, Op.PROD).tolist() == [False, False, False, True]


@pytest.mark.parametrize(("dtype", "op"), [(Dtype.F32, Op.BAND), (Dtype.I32, Op.AVG), (Dtype.OTHER, Op.SUM)])
def test_reduction_without_meaning_is_an_error(dtype, op):
    with pytest.raises(NativeError, match="EOPNOTSUPP"):
        _native.reduce_local("portable", 0, [0], 0, dtype, op)


def test_portable_code_is_always_there():
    assert ISAS[-1] == "portable"


def test_header_and_python_agree_on_abi_and_limits():
    from pathlib import Path

    header = (Path(_native.__file__).parent / "csrc" / "nd_core.h").read_text()
    for name, value in {
        "ND_ABI_VERSION": _native.ABI_VERSION,
        "ND_MAX_WORLD": _native.MAX_WORLD,
        "ND_NODE_WORDS": _native.NODE_WORDS,
    }.items():
        assert f"#define {name} {value}" in header, f"{name} is not {value} in nd_core.h"


def test_core_of_another_abi_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "ABI_VERSION", 999)
    with pytest.raises(NativeError, match="needs 999"):
        _native._load()
