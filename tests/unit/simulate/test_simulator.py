"""The simulator against the published figures, by the code that writes docs/simulator.md."""

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.commands.main import main
from numadist.costmodel.software import NUMA_TORCH, NUMADIST
from numadist.simulate import published
from numadist.simulate.models import ModelWork, _Captured

MIN_RIGHT_SIGNS = 0.9
MAX_MEAN_ERROR = 0.2
MIN_HELD_OUT = 19


@pytest.fixture(scope="module")
def results():
    return published.validate()


def described(results):
    return "\n".join(
        f"{r.figure.name}: published {r.figure.published}, predicted {r.predicted:.2f}" for r in results
    )


@pytest.mark.slow
def test_nine_in_ten_held_out_figures_have_the_right_sign(results):
    assert published.share_of_right_signs(results) >= MIN_RIGHT_SIGNS, described(results)


@pytest.mark.slow
def test_held_out_geometric_means_are_within_a_fifth(results):
    assert published.worst_mean_error(results) <= MAX_MEAN_ERROR, described(results)


@pytest.mark.slow
def test_most_figures_are_held_out(results):
    held_out = [r.figure.name for r in results if r.figure.held_out]
    assert len(held_out) >= MIN_HELD_OUT, held_out
    assert len([r for r in results if r.figure.fitted]) <= 7


@pytest.mark.slow
def test_as_many_configurations_as_a_count_names(results):
    kept = published.Predictions().seconds(published.HASWELL_EX, "default")
    assert len(kept) == published.MEASURED_ON_HASWELL_EX
    assert sum(seq <= 512 for *_, seq in kept) == 72
    assert sum(seq >= 2048 for *_, seq in kept) == next(
        r.figure.of for r in results if r.figure.name.endswith("slower at S>=2048")
    )


@pytest.mark.parametrize("software", [NUMA_TORCH, NUMADIST], ids=lambda s: s.name)
def test_work_of_all_layers_follows_from_one_and_two(software):
    """BERT small whole, its four layers captured, has the work that its first two tell."""
    counted = ModelWork("bert-small", 128).work(2, 3, 48, software)
    whole = _Captured("bert-small", 128, published_dtype(), {}).work(2, 3, 48, software.splits_vocabulary)

    def by_kind(work):
        return {(op.kind, op.share, op.rows): (op.flops, op.weight_bytes, op.scores) for op in work.ops}

    assert by_kind(counted) == by_kind(whole)
    assert sum(r.num_bytes * r.weight for r in counted.reductions) == sum(
        r.num_bytes * r.weight for r in whole.reductions
    )


def published_dtype():
    import torch

    return torch.float32


def test_command_says_that_it_is_a_simulation(capsys):
    words = [
        "simulate",
        "--machine",
        "haswell-ex",
        "--model",
        "bert-small",
        "--seq",
        "128,4096",
        "--batch",
        "2",
    ]
    assert main(words) == 0
    head, *_, short, long = capsys.readouterr().out.splitlines()
    assert head.startswith("SIMULATION: bert-small, float32, haswell-ex (4 nodes of 10 cores), 4 ranks")
    assert float(short.split()[1]) < 1 < float(long.split()[1])
