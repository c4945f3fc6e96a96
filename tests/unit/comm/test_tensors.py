"""What the core may read and write directly."""

import pytest
import torch

from numadist.comm.tensors import StagedOutputs, readable
from numadist.errors import CommError


def test_contiguous_tensor_is_used_as_it_is():
    x = torch.arange(6.0)
    assert readable(x) is x
    assert StagedOutputs().writable(x) is x


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(12.0)[::2],
        lambda: torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1),
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        lambda: torch.ones(3).expand(2, 3),
    ],
    ids=["transposed", "strided", "misaligned", "conjugate", "expanded"],
)
def test_other_tensors_are_read_by_a_copy_of_equal_values(make):
    x = make()
    copy = readable(x)
    assert torch.equal(copy, x)
    assert copy.is_contiguous()
    assert copy.data_ptr() % copy.element_size() == 0
    assert not copy.is_conj()


def test_staged_output_is_stored_where_it_belongs():
    whole = torch.zeros(4, 2)
    outputs = StagedOutputs()
    staged = outputs.writable(whole[:, 0], keep=True)
    staged += 3
    outputs.copy_back()
    assert torch.equal(whole, torch.tensor([[3.0, 0.0]] * 4))


@pytest.mark.parametrize(
    "x", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"]
)
def test_tensors_without_plain_memory_are_refused(x):
    with pytest.raises(CommError, match="dense CPU tensors"):
        readable(x)
    with pytest.raises(CommError, match="dense CPU tensors"):
        StagedOutputs().writable(x)
