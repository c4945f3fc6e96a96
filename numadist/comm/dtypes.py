"""What the core calls torch's dtypes and reductions."""

import torch
from torch.distributed import ReduceOp

from numadist._native import Dtype, Op

# dtype -> (the core's dtype, its elements per torch element). A complex sum is a sum of its two halves.
REDUCIBLE: dict[torch.dtype, tuple[Dtype, int]] = {
    torch.float32: (Dtype.F32, 1),
    torch.float64: (Dtype.F64, 1),
    torch.float16: (Dtype.F16, 1),
    torch.bfloat16: (Dtype.BF16, 1),
    torch.int8: (Dtype.I8, 1),
    torch.uint8: (Dtype.U8, 1),
    torch.int16: (Dtype.I16, 1),
    torch.uint16: (Dtype.U16, 1),
    torch.int32: (Dtype.I32, 1),
    torch.uint32: (Dtype.U32, 1),
    torch.int64: (Dtype.I64, 1),
    torch.uint64: (Dtype.U64, 1),
    torch.bool: (Dtype.BOOL, 1),
    torch.complex64: (Dtype.F32, 2),
    torch.complex128: (Dtype.F64, 2),
}

# Those whose element is one of the core's, so all but complex. Plain ints: ctypes takes an IntEnum three times slower.
REAL_CODES = {dtype: int(code) for dtype, (code, width) in REDUCIBLE.items() if width == 1}

OPS: dict[ReduceOp.RedOpType, Op] = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.AVG: Op.AVG,
    ReduceOp.PRODUCT: Op.PROD,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.BAND: Op.BAND,
    ReduceOp.BOR: Op.BOR,
    ReduceOp.BXOR: Op.BXOR,
}

# Every dtype has a code, so that ranks can compare what they move. Names are sorted: all ranks count alike.
_OTHERS = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    - {d for d, (_, width) in REDUCIBLE.items() if width == 1},
    key=str,
)
CODES: dict[torch.dtype, int] = {d: int(code) for d, (code, width) in REDUCIBLE.items() if width == 1} | {
    d: int(Dtype.OTHER) + i for i, d in enumerate(_OTHERS)
}
NAMES: dict[int, str] = {code: str(d).removeprefix("torch.") for d, code in CODES.items()}
