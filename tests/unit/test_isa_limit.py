"""NUMADIST_MAX_ISA: what kernels of all kinds then run, and that those left are right. Each in a process of its own."""

import os
import subprocess
import sys

import pytest

from numadist import _native

HERE = _native.supported_isas()  # of these tests, which may be limited themselves
WHAT_RUNS = "from numadist import _native; print(*_native.supported_isas())"
RESULTS = """
import torch
from numadist import _native
from numadist._native import Dtype, Op
from numadist.kernels import attention, half, quantized

torch.manual_seed(0)
for dtype, code in [(torch.float32, Dtype.F32), (torch.bfloat16, Dtype.BF16)]:
    a, b, total = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype), torch.empty(1000, dtype=dtype)
    _native.reduce_here(total.data_ptr(), [a.data_ptr(), b.data_ptr()], 1000, code, Op.SUM)
    assert torch.equal(total, (a.float() + b.float()).to(dtype)), f"sum in {dtype}"

x, w, y = torch.randn(3, 40), torch.randn(64, 40), torch.empty(3, 64)
panels = w.t().contiguous()  # one panel of 64 columns
code = _native.lib.nd_skinny_linear_f32(0, x.data_ptr(), panels.data_ptr(), None, y.data_ptr(), 3, 64, 40, 64)
torch.testing.assert_close(y, x @ w.t(), msg=lambda text: f"skinny, code {code}: {text}")

for queries in (1, 50):
    q, k, v = torch.randn(1, 4, queries, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    seen = attention.attention(q, k, v, None, False, 0.125)
    torch.testing.assert_close(seen, wanted, msg=lambda text: f"attention: {text}")
    seen = attention.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, False, 0.125)
    torch.testing.assert_close(seen.float(), wanted, rtol=0, atol=2e-2, msg=lambda text: f"bf16: {text}")

has_bf16 = "avx512_bf16" in _native.supported_isas()
assert half.pays(torch.bfloat16) or has_bf16
x, w = torch.randn(20, 40).bfloat16(), torch.randn(64, 40).bfloat16()
for rows in (x, x[:3]):
    seen = torch.ops.numadist.half_linear(rows, half.pack(w), None, 64)
    wanted = torch.nn.functional.linear(rows.float(), w.float())
    torch.testing.assert_close(seen.float(), wanted, rtol=8e-3, atol=1e-3, msg=lambda text: f"half: {text}")
p = quantized.pack(quantized.quantize(w.float(), 8))
seen = quantized.quantized_linear(x.float(), p.codes, p.scales, None, None, 64, 40, p.kind, 0)
torch.testing.assert_close(seen, x.float() @ w.float().t(), rtol=0, atol=0.4, msg=lambda text: f"int8: {text}")
print(*_native.supported_isas())
"""


def run(code, limit):
    environ = {**os.environ, "NUMADIST_MAX_ISA": limit, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)


def allowed(limit):
    """What of a list, best first, is no better than the limit."""
    return [name for name in HERE if _native.ISAS.index(name) <= _native.ISAS.index(limit)]


@pytest.mark.parametrize("limit", _native.ISAS)
def test_no_better_instruction_set_is_listed_and_one_the_cpu_lacks_is_no_error(limit):
    done = run(WHAT_RUNS, limit)
    assert done.returncode == 0, done.stderr
    seen = done.stdout.split()
    # These tests may run under a lower limit than the process they start.
    assert [name for name in seen if name in HERE] == allowed(limit), f"{limit}: {seen}"
    assert all(_native.ISAS.index(name) <= _native.ISAS.index(limit) for name in seen), f"{limit}: {seen}"
    assert seen[-1] == "portable"


@pytest.mark.parametrize("limit", ["portable", "avx2", "avx512"])
def test_kernels_obey_it_and_give_the_same(limit):
    done = run(RESULTS, limit)
    assert done.returncode == 0, done.stderr
    assert _native.ISAS.index(done.stdout.split()[0]) <= _native.ISAS.index(limit), done.stdout


@pytest.mark.parametrize("name", ["sse2", "AVX2", "avx5121"])
def test_an_unknown_name_is_an_error_that_names_those_there_are(name):
    done = run(WHAT_RUNS, name)
    assert done.returncode != 0
    said = f"ConfigError: NUMADIST_MAX_ISA is '{name}', which is none of {', '.join(_native.ISAS)}"
    assert said in done.stderr, done.stderr


def test_info_says_that_there_is_a_limit():
    done = run("from numadist.commands.main import main; main(['info'])", "portable")
    assert "instruction sets portable (at most portable, by NUMADIST_MAX_ISA)" in done.stdout, done.stderr
    assert "bfloat16 weights widened to f32 by our portable kernels" in done.stdout, done.stderr
