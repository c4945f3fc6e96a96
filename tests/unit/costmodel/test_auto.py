"""ranks="auto", blocks="auto" on one machine and another: the choice follows the profile."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from numadist.costmodel.presets import CASCADE_LAKE, HASWELL_EX, PRESETS
from numadist.costmodel.price import POLICIES, process_cores, process_s, rank_cores, sharded_s
from numadist.costmodel.profile import MachineProfile, interpolate
from numadist.costmodel.software import NUMADIST, SOFTWARE
from numadist.errors import ConfigError
from numadist.pipeline.explain import explain
from numadist.pipeline.stages import capture
from numadist.sharding.auto import choose_schema
from numadist.sharding.build_schema import build_schema
from numadist.sharding.count_work import work_of
from numadist.sharding.schema import Schema

WIDE, NARROW = 2048, 64
ROWS = 512


class Stack(nn.Module):
    """A large block and a small one."""

    def __init__(self):
        super().__init__()
        self.wide_up, self.wide_down = nn.Linear(512, WIDE), nn.Linear(WIDE, 512)
        self.narrow_up, self.narrow_down = nn.Linear(512, NARROW), nn.Linear(NARROW, 512)

    def forward(self, x):
        x = x + self.wide_down(nn.functional.gelu(self.wide_up(x)))
        return x + self.narrow_down(nn.functional.gelu(self.narrow_up(x)))


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return capture(Stack().eval(), (torch.randn(ROWS, 512),))


def with_sums(factor: float) -> MachineProfile:
    """Cascade Lake with all-reduces so many times as slow."""
    sums = {n: {size: factor * us for size, us in t.items()} for n, t in CASCADE_LAKE.all_reduce_us.items()}
    return replace(CASCADE_LAKE, all_reduce_us=sums)


def sharded_modules(schema):
    return {name.partition("_")[0] for block in schema.blocks for name in block.params}


def test_free_sums_shard_every_block(captured):
    schema = choose_schema(captured, [2, 1], with_sums(1e-6), choose_blocks=True)
    assert (schema.num_ranks, sharded_modules(schema)) == (2, {"wide", "narrow"})


def test_a_block_too_small_for_its_sum_stays_whole(captured):
    costs = choose_schema(captured, [2], with_sums(1e-6), True).costs.blocks
    # So slow that the sum costs half of what the large block saves, and more than the small one does.
    saved_ms = max(c.whole_ms - c.sharded_ms for c in costs)
    own_ms = 1e3 * CASCADE_LAKE.all_reduce_s(2, ROWS * 512 * 4)
    schema = choose_schema(captured, [2], with_sums(0.5 * saved_ms / own_ms), choose_blocks=True)
    assert sharded_modules(schema) == {"wide"}
    assert [c.sharded for c in schema.costs.blocks] == [True, False]
    assert "sharding does not pay" in schema.left_alone[-1].reason


def test_very_slow_sums_leave_one_process(captured):
    schema = choose_schema(captured, [2, 1], with_sums(1e6), choose_blocks=True)
    assert (schema.num_ranks, schema.blocks) == (1, [])
    assert [(c.num_ranks, c.num_blocks) for c in schema.costs.candidates] == [(2, 2), (2, 0), (1, 0)]


def test_without_blocks_auto_every_block_is_sharded_whatever_it_costs(captured):
    schema = choose_schema(captured, [2], with_sums(1e6), choose_blocks=False)
    assert sharded_modules(schema) == {"wide", "narrow"}


def test_costs_survive_json_and_are_explained(captured):
    schema = choose_schema(captured, [2, 1], with_sums(1e6), choose_blocks=True)
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.costs.profile == "cascade-lake"
    text = explain(
        Stack().eval(), torch.randn(ROWS, 512), 2, ranks="auto", blocks="auto", profile=with_sums(1e6)
    )
    assert "predicted for cascade-lake:" in text
    plans = [line for line in text.splitlines() if " ms  " in line]
    assert [line.split(":")[0].strip() for line in plans] == [
        "2 ranks, 2 blocks sharded",
        "2 ranks, 0 blocks sharded",
        "one rank with all cores",
    ]
    assert "rejected: 2 of its blocks do not pay" in plans[0]
    assert "times as long as the chosen plan" in plans[1]
    assert plans[2].endswith("<- chosen")


def test_explain_considers_every_number_of_equal_groups_of_a_machines_nodes():
    machine = replace(HASWELL_EX, name="four")
    text = explain(Stack().eval(), torch.randn(ROWS, 512), ranks="auto", blocks="auto", profile=machine)
    assert [f"{n} ranks, " in text for n in (4, 3, 2)] == [True, False, True]
    assert "one rank with all cores: " in text


def test_a_plan_that_is_hardly_faster_than_one_with_more_ranks_is_rejected(captured):
    """Sums are made just so slow that one rank is 1 % faster."""
    two, one = (choose_schema(captured, [n], with_sums(1e-6), False).costs.candidates[0] for n in (2, 1))
    sums_ms = (
        choose_schema(captured, [2], with_sums(1.0), False).costs.candidates[0].predicted_ms
        - two.predicted_ms
    )
    factor = (1.01 * one.predicted_ms - two.predicted_ms) / sums_ms
    chosen, other = choose_schema(captured, [2, 1], with_sums(factor), False).costs.candidates
    assert (chosen.num_ranks, chosen.rejected) == (2, "")
    assert (other.num_ranks, other.rejected) == (
        1,
        "not 3% faster than the chosen plan, which uses more ranks",
    )


def test_work_counts_what_the_layers_do(captured):
    work = work_of(captured.gm, build_schema(captured, 2))
    linears = {op.node: op for op in work.ops if op.kind == "linear"}
    assert sum(op.flops for op in linears.values()) == 2 * 2 * ROWS * 512 * (WIDE + NARROW)
    assert sum(op.weight_bytes for op in linears.values()) == 4 * 2 * 512 * (WIDE + NARROW)
    assert {op.share for op in linears.values()} == {0.5}
    assert [r.num_bytes for r in work.reductions] == [ROWS * 512 * 4] * 2


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_a_source_for_every_number_and_survive_json(name):
    preset = PRESETS[name]
    assert MachineProfile.from_json(preset.to_json()) == preset
    numbers = set(preset.__dataclass_fields__) - {"name", "sources"}
    assert set(preset.sources) == numbers


@pytest.mark.parametrize("text", ["[]", "{}", '{"numadist_profile": 99}', '{"numadist_profile": 1}'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ConfigError, match="profile"):
        MachineProfile.from_json(text)


def test_values_between_two_sizes_follow_a_line_in_logarithms():
    table = {10: 1.0, 1000: 100.0}
    assert interpolate(table, 100) == pytest.approx(10)
    assert (interpolate(table, 1), interpolate(table, 10**6)) == (1.0, 100.0)


@pytest.mark.parametrize("software", SOFTWARE.values(), ids=SOFTWARE)
def test_remote_memory_makes_one_process_slower_and_ranks_not(captured, software):
    near = replace(CASCADE_LAKE, bandwidth_gbs=((98.0, 98.0), (98.0, 98.0)))
    far = replace(CASCADE_LAKE, bandwidth_gbs=((98.0, 9.0), (9.0, 98.0)))
    one, two = (
        work_of(captured.gm, build_schema(captured, 1)),
        work_of(captured.gm, build_schema(captured, 2)),
    )
    assert process_s(one, far, software) > process_s(one, near, software)
    assert sharded_s(two, far, software) == sharded_s(two, near, software)


def test_an_unknown_policy_is_named(captured):
    with pytest.raises(ConfigError, match="'numactl'; known: default"):
        process_cores(CASCADE_LAKE, "numactl")
    assert [process_cores(CASCADE_LAKE, p).cores for p in POLICIES] == [30, 30, 30, 15]


def test_ranks_share_a_nodes_bandwidth():
    assert rank_cores(CASCADE_LAKE, 2).stream_gbs == CASCADE_LAKE.local_gbs
    assert rank_cores(CASCADE_LAKE, 4).stream_gbs == CASCADE_LAKE.local_gbs / 2
    assert rank_cores(CASCADE_LAKE, 4).cores == 7


def test_one_rank_has_no_sums(captured):
    work = work_of(captured.gm, build_schema(captured, 1))
    assert work.reductions == ()
    assert sharded_s(work, CASCADE_LAKE, NUMADIST) > 0


def test_explain_auto_without_a_machine_takes_the_kept_profile(tmp_path, monkeypatch, capsys):
    from numadist.commands import explain as explain_command
    from numadist.costmodel.measure import cache_file, save_atomically

    pytest.importorskip("transformers", reason="needs the extra `models`")
    monkeypatch.setenv("HOME", str(tmp_path))
    save_atomically(replace(CASCADE_LAKE, name="kept here"), cache_file())
    assert explain_command.main(["gpt2-tiny", "--auto"]) == 0
    assert "kept here" in capsys.readouterr().out
