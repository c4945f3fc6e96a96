"""Attention in the cost model: each side is priced by the kernel it runs, and rates of both are measured."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from numadist.costmodel import measure
from numadist.costmodel.presets import CASCADE_LAKE
from numadist.costmodel.price import process_s, sharded_s
from numadist.costmodel.software import NUMADIST
from numadist.errors import NumadistError
from numadist.kernels.attention import pays
from numadist.pipeline.stages import capture
from numadist.sharding.build_schema import build_schema
from numadist.sharding.count_work import work_of

TOKENS, HEADS = 64, 4
FULL, CAUSAL, DENSE, OURS = 20.0, 30.0, 10.0, 80.0  # GFLOP/s a core


class Attention(nn.Module):
    def __init__(self, head_dim: int, is_causal: bool, mask: torch.Tensor | None = None):
        super().__init__()
        self.head_dim, self.is_causal, self.mask = head_dim, is_causal, mask
        width = HEADS * head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.is_causal)
        return self.o(y.transpose(1, 2).flatten(2))


def work(num_ranks, head_dim=32, dtype=torch.bfloat16, is_causal=True, mask=None):
    model = Attention(head_dim, is_causal, mask).to(dtype).eval()
    captured = capture(model, (torch.randn(1, TOKENS, HEADS * head_dim, dtype=dtype),))
    return work_of(captured.gm, build_schema(captured, num_ranks))


def machine(ours: dict[str, dict[int, float]]):
    torchs = {"bfloat16": {1: FULL}, "bfloat16 causal": {1: CAUSAL}, "bfloat16 dense": {1: DENSE}}
    return replace(
        CASCADE_LAKE,
        attention_gflops={**CASCADE_LAKE.attention_gflops, **torchs},
        own_attention_gflops=ours,
    )


WITH, WITHOUT = machine({"bfloat16 causal": {1: OURS}}), machine({})


def attention_s(gflops: float, head_dim: int = 32) -> float:
    """On all cores of the machine."""
    return 4.0 * HEADS * TOKENS * TOKENS * head_dim / (1e9 * gflops * CASCADE_LAKE.num_cores)


def test_ranks_are_priced_by_our_kernel_and_one_process_by_torchs():
    one, two = work(1), work(2)
    saved_s = sharded_s(two, WITHOUT, NUMADIST) - sharded_s(two, WITH, NUMADIST)
    assert saved_s == pytest.approx(attention_s(CAUSAL) - attention_s(OURS))
    assert process_s(one, WITH, NUMADIST) == process_s(one, WITHOUT, NUMADIST)


def test_one_process_compares_the_dense_mask_that_ranks_know_to_be_causal():
    one = work(1)
    difference_s = process_s(one, WITHOUT, NUMADIST) - sharded_s(one, WITHOUT, NUMADIST)
    assert difference_s == pytest.approx(attention_s(DENSE) - attention_s(CAUSAL))


@pytest.mark.parametrize(
    "form",
    [
        {"head_dim": 24},
        {"dtype": torch.float32},
        {"is_causal": False},
        {"is_causal": False, "mask": torch.rand(TOKENS, TOKENS, dtype=torch.bfloat16)},
    ],
    ids=["head dim 24", "float32", "no mask", "dense mask"],
)
def test_attention_that_our_kernel_does_not_take_or_has_no_rates_of_is_priced_as_torchs(form):
    two = work(2, **form)
    assert sharded_s(two, WITH, NUMADIST) == sharded_s(two, WITHOUT, NUMADIST)


def test_rates_are_looked_up_by_the_number_of_keys():
    """However many heads and rows a model has."""
    (op,) = (op for op in work(1).ops if op.kind == "attention")
    assert (op.rows, op.keys) == (HEADS * TOKENS, TOKENS)
    (merged,) = (op for op in work(1).merged().ops if op.kind == "attention")
    assert (merged.keys, merged.mask, merged.fits_ours) == (TOKENS, "causal", True)


@pytest.mark.parametrize("mask", measure.MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_kernels_are_measured_at_the_same_attention(dtype, mask):
    jobs = measure.attention_jobs(40, dtype, mask)
    used = pays(measure.DEPTH, dtype, torch.bool if mask == "dense" else None, mask == "causal")
    assert set(jobs) == {"attention"} | ({"own_attention"} if used else set())
    for job in jobs.values():
        torch.testing.assert_close(job().float(), jobs["attention"]().float(), atol=2e-2, rtol=2e-2)


def test_a_profile_kept_by_an_older_version_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    measure.save_atomically(CASCADE_LAKE, measure.cache_file())
    assert measure.kept_profile() == CASCADE_LAKE
    monkeypatch.setattr(measure, "VERSION", measure.VERSION + 1)
    with pytest.raises(NumadistError, match="run `numadist profile` once"):
        measure.kept_profile()
