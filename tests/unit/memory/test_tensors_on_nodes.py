"""Pages on the asked node, by the kernel's word. Every machine has node 0; more are tests/guest's business."""

import gc
import os

import pytest
import torch

from numadist import _native
from numadist.errors import BindError, NativeError, PlacementError
from numadist.memory.pages import num_pages, page_nodes
from numadist.memory.tensors import clone, empty, patch_clone

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (1000, 7), (3, 1, 70001)], ids=str)
def test_clone_has_equal_values_and_all_pages_on_its_node(dtype, shape):
    x = torch.randn(shape).to(dtype)
    copy = clone(x, numa_node=0)
    assert copy.dtype == x.dtype
    assert copy.shape == x.shape
    assert torch.equal(copy, x)
    assert page_nodes(copy) == ({0: num_pages(copy)} if x.numel() else {})


def test_clone_of_a_transposed_tensor_is_contiguous():
    x = torch.arange(6.0).view(2, 3).t()
    copy = clone(x, numa_node=0)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)


def test_empty_is_zero_and_page_aligned():
    x = empty((5, 1000), torch.float32, numa_node=0)
    assert x.data_ptr() % PAGE == 0
    assert x.count_nonzero() == 0
    assert _native.bound_nodes(x.data_ptr()) == {0}


def test_pages_live_as_long_as_a_view_and_no_longer():
    x = empty((1000,), torch.float32, numa_node=0)
    address, view = x.data_ptr(), x[10:20]
    view += 1
    del x
    gc.collect()
    assert view.sum() == 10
    assert is_mapped(address)
    del view
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    # A neighbour's mapping may be merged with ours, so look for the address, not for the beginning.
    inside = any(int(a, 16) <= address < int(b, 16) for a, b in spans)
    if not inside:
        return False
    try:
        return _native.bound_nodes(address) == {0}
    except NativeError:
        return False


def test_absent_node_is_named():
    with pytest.raises(BindError, match=r"nodes \[1000\]"):
        empty((4,), torch.float32, numa_node=1000)


def test_node_number_beyond_the_kernel_is_named():
    with pytest.raises(NativeError, match="memory node 5000"):
        empty((4,), torch.float32, numa_node=5000)


def test_untouched_pages_are_not_counted():
    address = _native.map_memory(8 * PAGE)
    try:
        assert all(node < 0 for node in _native.page_nodes(address, 8 * PAGE))
        assert _native.touch_memory(address + 2 * PAGE, 3 * PAGE) == 0
        touched = [i for i, node in enumerate(_native.page_nodes(address, 8 * PAGE)) if node >= 0]
        assert touched == [2, 3, 4]
    finally:
        _native.unmap_memory(address, 8 * PAGE)


def test_pages_of_a_view_are_those_it_lies_on():
    x = empty((4 * PAGE,), torch.uint8, numa_node=0)
    assert num_pages(x) == 4
    assert page_nodes(x[PAGE - 1 : PAGE + 1]) == {0: 2}
    assert page_nodes(x[::PAGE]) == {0: 4}


def test_meta_tensor_has_no_pages():
    with pytest.raises(PlacementError, match="meta"):
        page_nodes(torch.empty(3, device="meta"))


def test_patched_clone_takes_a_node_and_is_otherwise_the_plain_one(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clone", torch.Tensor.clone)  # put back afterwards
    patch_clone()
    patched = torch.Tensor.clone
    patch_clone()
    assert torch.Tensor.clone is patched, "a second call changes nothing"
    x = torch.randn(300, 7, requires_grad=True)
    there = x.clone(numa_node=0)
    assert torch.equal(there, x)
    assert _native.bound_nodes(there.data_ptr()) == {0}
    plain = x.t().clone(memory_format=torch.contiguous_format)
    assert plain.is_contiguous()
    assert plain.requires_grad, "without a node, gradients pass as before"
    assert torch.equal(torch.compile(lambda t: t.clone() + 1, backend="eager")(x), x + 1)
