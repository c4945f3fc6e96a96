"""Cuts: they cover what they must, and reshapes carry them through."""

import math

import pytest
import torch

from numadist.sharding.placement import (
    CannotShard,
    DimShard,
    NeedsUnit,
    NotABox,
    Shard,
    base_unit,
    cut_size,
    flatten,
    merge,
    regroup,
    split_units,
    unflatten,
)
from numadist.weights.load import local_slice


def indices(cut):
    return [i for start, stop in cut for i in range(start, stop)]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("size", [64, 96, 100, 576, 768, 3072, 50])
def test_an_even_cut_covers_every_index_once_and_is_balanced(size, num_ranks):
    unit = base_unit(size, num_ranks)
    cuts = split_units(size, (unit,), num_ranks)
    assert [i for cut in cuts for i in indices(cut)] == list(range(size))
    sizes = [cut_size(cut) for cut in cuts]
    assert max(sizes) - min(sizes) <= unit, f"{size} over {num_ranks} ranks on units of {unit}: {sizes}"


@pytest.mark.parametrize(
    ("units", "num_ranks", "sizes"),
    [
        ((192,), 2, [384, 192]),  # SmolLM2: 9 heads of 64 in 3 KV groups
        ((64, 192), 3, [192, 192, 192]),
        ((64, 192), 4, [128, 64, 192, 192]),  # two ranks share the first KV group
        ((64, 192), 9, [64] * 9),
        ((64, 192), 10, None),
        ((192,), 4, None),
    ],
)
def test_whole_kv_groups_are_dealt_out_first_and_shared_only_when_too_few(units, num_ranks, sizes):
    cuts = split_units(576, units, num_ranks)
    found = None if cuts is None else [cut_size(c) for c in cuts]
    assert found == sizes, f"units {units} over {num_ranks} ranks gave {found}"
    if cuts is not None:
        assert [i for cut in cuts for i in indices(cut)] == list(range(576))


@pytest.mark.parametrize(
    ("cut", "sizes"),
    [
        (((0, 6),), [3, 4]),  # whole outer indices plus a part: no box
        (((0, 4), (6, 8)), [2, 6]),
    ],
)
def test_a_cut_that_is_no_box_is_refused(cut, sizes):
    with pytest.raises(NotABox):
        unflatten(cut, sizes, inside_ok=False)


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ([9, 64], [((0, 6),), None]),
        ([3, 6, 16], [None, ((0, 3),), None]),  # fused QKV: the same heads of each third
        ([2, 3, 4], [((1, 2),), None, None]),
        ([5, 3], [((0, 1), (3, 5)), None]),
    ],
)
def test_flatten_and_unflatten_are_inverse(sizes, cuts):
    flat = flatten(cuts, sizes)
    wanted = [merge(c) if c is not None else ((0, n),) for c, n in zip(cuts, sizes, strict=True)]
    assert unflatten(flat, sizes, inside_ok=False) == wanted
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    shard = Shard({d: DimShard((c,)) for d, c in enumerate(cuts) if c is not None})
    assert indices(flat) == local_slice(grid, shard, 0).flatten().tolist()


def test_a_cut_inside_a_head_names_the_head_as_unit():
    half = DimShard((((0, 288),), ((288, 576),)))
    with pytest.raises(NeedsUnit) as need:
        regroup({0: half}, [576], [9, 64], num_ranks=2, inside_ok=False)
    assert need.value.unit == 64


def test_a_rank_may_hold_a_share_of_one_kv_group_only_when_allowed():
    heads = DimShard((((0, 2),), ((2, 4),)), scale=16)
    pair = regroup({0: heads}, [4], [1, 4], num_ranks=2, inside_ok=True)
    assert pair[0].cuts == (((0, 1),), ((0, 1),)), "both ranks hold the one KV head"
    two_groups = DimShard((((0, 3),), ((3, 4),)), scale=16)
    with pytest.raises((NeedsUnit, CannotShard)):
        regroup({0: two_groups}, [4], [2, 2], num_ranks=2, inside_ok=False)


def test_dims_held_whole_by_every_rank_are_no_shard():
    assert not Shard.of({0: DimShard((((0, 1),), ((0, 1),)))}, (1, 8))
    assert Shard.of({0: DimShard((((0, 4),), ((4, 8),)))}, (8,))


def test_shard_survives_json():
    shard = Shard({1: DimShard((((0, 48), (96, 144)), ((48, 96), (144, 192))))})
    assert Shard.from_json(shard.to_json()) == shard
