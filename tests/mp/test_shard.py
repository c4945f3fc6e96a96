"""numadist.shard over real process groups: on backend numa and on gloo it equals the unsharded model."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

pytestmark = pytest.mark.mp


def sharded_and_expected(name, compile=False, dtype=torch.float32):
    import numadist
    from numadist import models

    torch._dynamo.reset()
    model = models.build(name, dtype)
    ids = torch.randint(512, (1, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad():
        expected = model(**inputs).logits
        sharded = numadist.shard(model, inputs, compile=compile)
        return sharded, sharded(input_ids=ids).logits, expected, model


def check_model(rank, world, name, compile):
    sharded, logits, expected, model = sharded_and_expected(name, compile)
    error = (logits - expected).abs().max().item()
    assert error < 1e-5, f"{name} on rank {rank} of {world}: {error}"
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return sharded.local_bytes / whole, logits


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_sharded_model_equals_the_unsharded_one(group, name):
    answers = group.run(check_model, name, False)
    assert max(share for share, _ in answers) < 1 / group.world + 0.1
    assert all(torch.equal(logits, answers[0][1]) for _, logits in answers), "ranks differ in bits"


def test_compiled_sharded_model_equals_the_unsharded_one(numa_pair):
    numa_pair.run(check_model, "gpt2-tiny", True)


def check_architectures(rank, world):
    """Largest error of every architecture of the unit tests' table, as a share of the output's scale."""
    import sys

    import numadist

    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sharding"))
    from zoo import ZOO, main_output, make

    errors = {}
    for name, entry in ZOO.items():
        inputs = entry.inputs()
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        model = make(name)
        with torch.no_grad():
            truth = main_output(model(*args, **kwargs)).float()
            ours = main_output(numadist.shard(model, inputs)(*args, **kwargs)).float()
        errors[name] = ((ours - truth).abs().max() / truth.abs().max()).item()
    return errors


def test_every_architecture_equals_the_unsharded_one(group):
    for errors in group.run(check_architectures):
        assert len(errors) >= 18
        assert max(errors.values()) < 1e-5, errors


def check_bf16(rank, world):
    from numadist import models

    _, logits, _, model = sharded_and_expected("llama-tiny", dtype=torch.bfloat16)
    ids = torch.randint(512, (1, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad():
        truth = models.build("llama-tiny").to(torch.bfloat16).float()(**inputs).logits
        unsharded = (model(**inputs).logits.float() - truth).abs().max().item()
    ours = (logits.float() - truth).abs().max().item()
    assert ours <= 1.5 * unsharded + 1e-6, f"bf16 error {ours}, unsharded bf16 {unsharded}"


def test_bf16_is_no_further_from_the_truth_than_the_unsharded_model(group):
    group.run(check_bf16)


def check_sequence_parallel(rank, world):
    """One sequence, split by positions, and several, split by sequences; both unevenly."""
    import sys

    import numadist

    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sharding"))
    from zoo import ZOO, main_output, make, tokens

    for name, batch, dtype in (
        ("gpt2", 1, torch.float32),
        ("gpt2", 2 * world - 1, torch.float32),
        ("llama-uneven", 1, torch.float32),
        ("bert", 1, torch.bfloat16),
    ):
        inputs = {**ZOO[name].inputs(), "input_ids": tokens(11, batch)}
        model = make(name).to(dtype)
        with torch.no_grad():
            truth = main_output(make(name).to(dtype).float()(**inputs))
            schema = numadist.plan(model, inputs, sequence_parallel=True)
            sharded = numadist.shard(model, inputs, schema=schema)
            ours, unsharded = main_output(sharded(**inputs)), main_output(model(**inputs))
        assert not sharded.schema.sequence.all_reduced
        error, scale = (ours - truth).abs().max().item(), truth.abs().max().item()
        limit = 1e-5 * scale if dtype == torch.float32 else 1.5 * (unsharded - truth).abs().max().item()
        assert error <= limit, f"{name}, batch {batch}, {dtype}: {error} of {scale}, limit {limit}"
    return ours


def test_sequence_parallel_equals_the_unsharded_model(group):
    answers = group.run(check_sequence_parallel)
    assert all(torch.equal(answer, answers[0]) for answer in answers), "ranks differ in bits"


def check_sequence_parallel_compiled(rank, world):
    import numadist
    from numadist import models

    torch._dynamo.reset()
    model = models.build("gpt2-tiny", n_layer=1)
    inputs = {"input_ids": torch.arange(11)[None], "use_cache": False, "logits_to_keep": 1}
    schema = numadist.plan(model, inputs, sequence_parallel=True)
    sharded = numadist.shard(model, inputs, schema=schema, compile=True)
    with torch.no_grad():
        for _ in range(2):
            error = (sharded(**inputs).logits - model(**inputs).logits).abs().max().item()
            assert error < 1e-5, f"rank {rank} of {world}: {error}"


@pytest.mark.slow
def test_sequence_parallel_compiled(numa_pair):
    numa_pair.run(check_sequence_parallel_compiled)


def check_sequence_parallel_refused(rank, world):
    import numadist
    from numadist import models

    model = models.build("gpt2-tiny")
    x = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "use_cache": False}
    schema = numadist.plan(model, x, sequence_parallel=True)
    assert schema.sequence
    with pytest.raises(
        numadist.ShardError, match=r"sequence parallelism, which numadist\.shard has for inference"
    ):
        numadist.shard(model, x, schema=schema, train=True)


def test_sequence_parallel_is_refused_for_training(numa_pair):
    numa_pair.run(check_sequence_parallel_refused)


def check_without_copying_the_whole(rank, world):
    """The sharded module keeps no reference to full weights."""
    import gc
    import weakref

    import numadist
    from numadist import models

    model = models.build("gpt2-tiny")
    whole = [weakref.ref(p) for p in model.parameters()]
    inputs = {"input_ids": torch.arange(8)[None], "use_cache": False, "logits_to_keep": 1}
    sharded = numadist.shard(model, inputs)
    del model
    gc.collect()
    alive = sum(ref() is not None for ref in whole)
    assert alive == 0, f"{alive} full parameters are still alive"
    return sharded.local_bytes


def test_full_weights_are_freed_with_the_original_model(group):
    group.run(check_without_copying_the_whole)


def check_peak_memory(rank, world, folder):
    """Resident memory that loading a sharded model adds at its peak, and the bytes of its weights."""
    import numadist

    inputs = {"input_ids": torch.arange(8)[None], "use_cache": False, "logits_to_keep": 1}
    warm, _, _, _ = sharded_and_expected("gpt2-tiny")  # what torch itself costs, once
    del warm
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from now
    before = peak_bytes()
    with numadist.empty_parameters():
        hollow = big_gpt2()
    sharded = numadist.shard(hollow, inputs, weights=folder)
    return peak_bytes() - before, sharded.local_bytes


def peak_bytes():
    (line,) = [li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def big_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4)).eval()


FIXED_BYTES = 40e6  # exporting and planning a larger graph, and the read buffer


def test_a_rank_never_holds_more_than_its_slices(group, tmp_path):
    whole = big_gpt2()
    whole.save_pretrained(tmp_path)
    whole_bytes = sum(p.numel() * p.element_size() for p in whole.parameters())
    del whole
    for added, local_bytes in group.run(check_peak_memory, str(tmp_path)):
        assert local_bytes < whole_bytes / group.world * 1.1
        assert added < 1.15 * local_bytes + FIXED_BYTES, (
            f"{added / 1e6:.0f} MB for {local_bytes / 1e6:.0f} MB"
        )


def check_compile_backend(rank, world):
    from numadist import models

    torch._dynamo.reset()
    model = models.build("llama-tiny")
    compiled = torch.compile(model, backend="numadist")
    with torch.no_grad():
        for length in (10, 10):
            ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(length))
            expected = model(input_ids=ids, use_cache=False).logits
            error = (compiled(input_ids=ids, use_cache=False).logits - expected).abs().max().item()
            assert error < 1e-5, f"rank {rank} of {world}, length {length}: {error}"


def test_torch_compile_with_backend_numadist(numa_pair):
    numa_pair.run(check_compile_backend)


def check_different_shapes(rank, world):
    import numadist
    from numadist import models

    ids = torch.arange(8 + rank)[None]
    with pytest.raises(numadist.ShardError, match="planned another graph than rank 0"):
        numadist.shard(models.build("gpt2-tiny"), {"input_ids": ids, "use_cache": False, "logits_to_keep": 1})


def test_ranks_with_different_shapes_are_told_before_weights_are_loaded(group):
    group.run(check_different_shapes)


def check_schema_from_file(rank, world, path):
    """A schema edited by hand: the attention of layer 0 stays whole."""
    import numadist
    from numadist import models

    model, inputs = (
        models.build("gpt2-tiny"),
        {"input_ids": torch.arange(8)[None], "use_cache": False, "logits_to_keep": 1},
    )
    first = numadist.shard(model, inputs)
    edited = numadist.Schema.from_json(first.schema.to_json())
    edited.blocks = [b for b in edited.blocks if b.module != "transformer.h.0.attn"]
    if rank == 0:
        edited.save(path)
    torch.distributed.barrier()
    again = numadist.shard(model, inputs, schema=numadist.Schema.load(path))
    assert again.local_bytes > first.local_bytes
    with torch.no_grad():
        error = (again(**inputs).logits - model(**inputs).logits).abs().max().item()
    assert error < 1e-5


def test_an_edited_schema_is_followed(numa_pair, tmp_path):
    numa_pair.run(check_schema_from_file, str(tmp_path / "schema.json"))
