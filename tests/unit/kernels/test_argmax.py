"""The best of each row of logits is torch's argmax, whatever the dtype, the layout and what is not a number."""

import pytest
import torch

from numadist.errors import NativeError
from numadist.kernels import argmax


def check(logits):
    seen = argmax.argmax(logits, 100)
    values, tokens = logits.float().max(-1)
    assert torch.equal(seen[:, 1], tokens.int() + 100)
    assert torch.equal(seen[:, 0], values.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7, 1024, 1025, 5000])
def test_is_the_first_of_the_highest(dtype, num_tokens):
    torch.manual_seed(num_tokens)
    wide = torch.randn(5, num_tokens + 3).to(dtype)
    wide[1] = 2.5  # all equal
    wide[2] = -torch.inf
    wide[3, num_tokens - 1] = 9.0
    check(wide[:, :num_tokens])


def test_of_what_is_not_a_number_the_first_wins():
    logits = torch.zeros(3, 3000)
    logits[0, [1500, 2500]] = torch.nan
    logits[1, 700], logits[1, 2999] = torch.inf, torch.nan
    check(logits)


def test_other_dtypes_and_layouts_are_not_taken():
    assert not argmax.takes(torch.zeros(2, 3, dtype=torch.float16))
    assert not argmax.takes(torch.zeros(3, 2).t())
    with pytest.raises(NativeError, match=r"argmax of logits \[2, 3\]"):
        argmax.argmax(torch.zeros(2, 3, dtype=torch.float16), 0)
