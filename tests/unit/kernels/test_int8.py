"""Linear layers on int8 weights: the packed order, both kernels, and what quantizing costs in precision."""

import pytest
import torch

from numadist._native_kernels import int8_linear_runs
from numadist.errors import NativeError
from numadist.kernels import int8

# Whole panels of 64 outputs and not, more panels than threads and fewer.
SHAPES = [(64, 2), (128, 64), (50, 66), (257, 130), (640, 384)]
KERNELS = [False, True] if int8_linear_runs() else [False]


@pytest.mark.parametrize("fast", KERNELS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_layer_is_the_f32_product_of_the_quantized_weights_rounded_once(fast, num_threads):
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.manual_seed(fast)
    try:
        for num_out, num_in in SHAPES:
            q_NK, scale_N = int8.quantize(torch.randn(num_out, num_in))
            bias = torch.randn(num_out).bfloat16()
            for num_rows in (1, 3, 4, 5, 16, 33):
                x = torch.randn(num_rows, num_in).bfloat16()
                for b in (None, bias):
                    wanted = x.float() @ (q_NK * scale_N[:, None]).t() + (0 if b is None else b.float())
                    seen = int8.int8_linear(x, int8.pack(q_NK), scale_N, b, fast)
                    # Half a step of bf16, and f32 sums in another order.
                    torch.testing.assert_close(
                        seen.float(),
                        wanted,
                        rtol=4.1e-3,
                        atol=1e-4 * num_in**0.5,
                        msg=lambda t, x=x: f"{x.shape} {t}",
                    )
    finally:
        torch.set_num_threads(threads)


def test_quantized_weights_are_within_half_a_step_and_a_column_of_zeros_stays_zero():
    w_NK = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    w_NK[7] = 0
    q_NK, scale_N = int8.quantize(w_NK)
    assert ((q_NK * scale_N[:, None] - w_NK).abs() <= 0.5001 * scale_N[:, None]).all()
    others = torch.arange(40) != 7
    assert (q_NK.abs().amax(1)[others] == 127).all()
    assert (q_NK[7] == 0).all()


def test_what_the_kernel_does_not_take_is_an_error():
    assert not int8.takes(64, torch.float32)
    assert not int8.takes(63, torch.bfloat16)
    x, scale = torch.zeros(1, 3, dtype=torch.bfloat16), torch.ones(4)
    with pytest.raises(NativeError, match="int8 linear layer of"):
        int8.int8_linear(x, torch.zeros(1, 1, 128, dtype=torch.uint8), scale, None, False)


def test_shapes_are_known_without_running():
    x, blob = torch.empty(2, 3, 8, device="meta"), torch.empty(1, 4, 128, device="meta")
    y = torch.ops.numadist.int8_linear(x, blob, torch.empty(5, device="meta"), None)
    assert y.shape == (2, 3, 5)
