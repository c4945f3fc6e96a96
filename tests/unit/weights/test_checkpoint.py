"""Reading slices of safetensors files, and models without memory for their weights."""

import json
import re

import pytest
import torch
from lockstep import run_all, shard_all

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra `models`")

from zoo import ZOO, main_output, make

from numadist.errors import ShardError
from numadist.sharding.placement import DimShard, Shard
from numadist.weights.conversions import conversions_of
from numadist.weights.fake import empty_parameters, is_fake
from numadist.weights.load import local_slice
from numadist.weights.safetensors import SafetensorsCheckpoint

CUTS = {
    "whole": Shard({}),
    "rows": Shard({0: DimShard((((0, 5),), ((5, 12),)))}),
    "columns": Shard({1: DimShard((((0, 9),), ((9, 30),)))}),
    "fused": Shard({1: DimShard((((0, 5), (10, 15), (20, 25)), ((5, 10), (15, 20), (25, 30))))}),
    "overlapping": Shard({0: DimShard((((0, 6),), ((0, 6),)))}),
    "both": Shard({0: DimShard((((0, 4),), ((4, 12),))), 1: DimShard((((0, 9),), ((9, 30),)))}),
    "nothing": Shard({0: DimShard(((), ((0, 12),)))}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", CUTS)
def test_a_slice_read_equals_the_slice_of_the_whole(tmp_path, cut, dtype):
    full, shard = torch.randn(12, 30).to(dtype), CUTS[cut]
    safetensors_torch.save_file({"other": torch.zeros(3), "w": full}, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path / "m.safetensors")
    for rank in range(2):
        out = torch.full(shard.local_shape((12, 30), rank), torch.nan)
        checkpoint.read_into(out, "w", shard, rank)
        assert torch.equal(out, local_slice(full, shard, rank).float())


def test_rows_larger_than_the_buffer_and_vectors_are_read(tmp_path):
    tensors = {"wide": torch.randn(3, 2_000_000), "vector": torch.randn(7), "scalar": torch.tensor(3.0)}
    safetensors_torch.save_file(tensors, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, full in tensors.items():
        out = torch.empty(full.shape)
        checkpoint.read_into(out, name, Shard({}), 0)
        assert torch.equal(out, full), name


def test_a_folder_of_several_files_is_one_checkpoint(tmp_path):
    safetensors_torch.save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    safetensors_torch.save_file({"b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    assert sorted(SafetensorsCheckpoint(tmp_path).names()) == ["a", "b"]


class Bert(torch.nn.Module):
    base_model_prefix = "bert"


def test_names_are_found_with_the_models_own_prefix_or_without(tmp_path):
    tensors = {"bert.layer.0.w": torch.ones(2), "head.w": torch.ones(3)}
    safetensors_torch.save_file(tensors, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, model=Bert())
    assert checkpoint.find(["layer.0.w"]) == "bert.layer.0.w"
    assert checkpoint.find(["bert.head.w"]) == "head.w"
    assert SafetensorsCheckpoint(tmp_path).find(["layer.0.w"]) is None


def test_a_name_that_only_ends_alike_is_another_tensor(tmp_path):
    safetensors_torch.save_file({"a.b.w": torch.ones(2), "z": torch.ones(2)}, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, model=Bert())
    assert checkpoint.find(["b.w"]) is None
    assert checkpoint.find(["model.a.b.w"]) is None
    with pytest.raises(ShardError, match=r"no tensor named b\.w; it has 2 others, the nearest are a\.b\.w"):
        checkpoint.found(["b.w"])


def test_a_folder_has_the_tensors_that_its_index_names(tmp_path):
    for file, value in (("a-1-of-2", 1.0), ("a-2-of-2", 2.0), ("zz_old", 9.0)):
        tensors = {"x": torch.full((2,), value), "y": torch.full((2,), -value)}
        safetensors_torch.save_file(tensors, tmp_path / f"{file}.safetensors")
    with pytest.raises(ShardError, match=r"has x in a-1-of-2\.safetensors and in a-2-of-2\.safetensors"):
        SafetensorsCheckpoint(tmp_path)
    index = {"weight_map": {"x": "a-1-of-2.safetensors", "y": "a-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint, x, y = SafetensorsCheckpoint(tmp_path), torch.empty(2), torch.empty(2)
    checkpoint.read_into(x, "x", Shard({}), 0)
    checkpoint.read_into(y, "y", Shard({}), 0)
    assert (x.tolist(), y.tolist()) == ([1.0, 1.0], [-2.0, -2.0])
    safetensors_torch.save_file({"x": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    assert SafetensorsCheckpoint(tmp_path).names() == ["x"], (
        "one file of that name comes first, as in transformers"
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index of safetensors files"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors is no safetensors file"),
        ('{"weight_map": {"other": "m.safetensors"}}', "has other in m.safetensors, which has not"),
    ],
)
def test_a_wrong_index_is_a_clear_error(tmp_path, index, message):
    safetensors_torch.save_file({"x": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ShardError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_tensors_that_the_model_does_not_use_are_said_once(tmp_path, caplog):
    safetensors_torch.save_file({n: torch.ones(1) for n in "abcdef"}, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with caplog.at_level("WARNING", logger="numadist"):
        checkpoint.warn_of_unused(["a", "b", "c", "d", "e", "f", "g"])
        assert not caplog.records
        checkpoint.warn_of_unused(["a", "b"])
    (record,) = caplog.records
    assert record.getMessage().endswith("has 4 tensors that the model does not use: c, d, e ...")


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_experts_are_read_from_a_tensor_each(tmp_path, name):
    model, inputs = make(name), ZOO[name].inputs()
    model.save_pretrained(tmp_path)
    assert not any(n.endswith("gate_up_proj") for n in SafetensorsCheckpoint(tmp_path).names()), (
        "the file has them apart"
    )
    with empty_parameters():
        hollow = ZOO[name].build().eval()
    checkpoint = SafetensorsCheckpoint(tmp_path, conversions_of(hollow))
    _, graphs, board = shard_all(hollow, inputs, 2, checkpoint=checkpoint)
    _, expected, expected_board = shard_all(model, inputs, 2)
    for rank in range(2):
        wanted = dict(expected[rank].named_parameters())
        for key, value in graphs[rank].named_parameters():
            assert torch.equal(value, wanted[key]), key
    assert torch.equal(
        main_output(run_all(graphs, inputs, board)[0]),
        main_output(run_all(expected, inputs, expected_board)[0]),
    )


def test_an_expert_without_all_its_parts_is_a_missing_tensor(tmp_path):
    parts = {
        f"mlp.experts.{i}.{part}.weight": torch.ones(4, 4)
        for i in range(2)
        for part in ("gate_proj", "up_proj")
    }
    del parts["mlp.experts.1.up_proj.weight"]
    safetensors_torch.save_file(parts, tmp_path / "m.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, conversions_of(make("deepseek-v3")))
    with pytest.raises(ShardError, match=r"no tensor named mlp\.experts\.gate_up_proj"):
        checkpoint.found(["mlp.experts.gate_up_proj"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no safetensors file"), (b"\x04\0\0\0\0\0\0\0{]}[", "no safetensors file")],
)
def test_a_damaged_file_is_a_clear_error(tmp_path, content, message):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ShardError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_an_empty_folder_a_truncated_file_and_a_wrong_shape_are_clear_errors(tmp_path):
    with pytest.raises(ShardError, match="no \\.safetensors file"):
        SafetensorsCheckpoint(tmp_path)
    path = tmp_path / "m.safetensors"
    safetensors_torch.save_file({"w": torch.randn(8, 8)}, path)
    with pytest.raises(ShardError, match="checkpoint is for another model"):
        SafetensorsCheckpoint(path).read_into(torch.empty(4, 4), "w", Shard({}), 0)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ShardError, match="truncated: 10 bytes missing"):
        SafetensorsCheckpoint(path).read_into(torch.empty(8, 8), "w", Shard({}), 0)


def test_a_file_with_any_byte_of_its_header_changed_is_refused_where_the_library_refuses_it(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors_torch.save_file({"a": torch.arange(12.0).view(3, 4), "b": torch.arange(7).half()}, path)
    whole = path.read_bytes()
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        for value in {0, 0x7F, 0xFF, *b'9"-.b', whole[at] ^ 1} - {whole[at]}:
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                wanted = safetensors_torch.load_file(path)
            except Exception:  # of several kinds
                with pytest.raises(ShardError, match=re.escape(str(path))):
                    SafetensorsCheckpoint(path)
                continue
            checkpoint = SafetensorsCheckpoint(path)
            for name, tensor in wanted.items():
                out = torch.empty_like(tensor)
                checkpoint.read_into(out, name, Shard({}), 0)
                assert torch.equal(out, tensor)


def test_bytes_behind_the_tensors_and_a_header_longer_than_the_file_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors_torch.save_file({"w": torch.ones(3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"more")
    with pytest.raises(ShardError, match="damaged: 4 bytes lie behind its tensors"):
        SafetensorsCheckpoint(path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ShardError, match=f"a header of {1 << 60} bytes in a file of {len(whole)}"):
        SafetensorsCheckpoint(path)


def test_a_dtype_we_do_not_know_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ShardError, match="w has dtype F4"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama-uneven", "gemma3", "bert"])
def test_a_model_without_memory_loads_its_slices_from_the_checkpoint(tmp_path, name):
    model, inputs = make(name), ZOO[name].inputs()
    model.save_pretrained(tmp_path)
    with empty_parameters():
        hollow = ZOO[name].build().eval()
    assert all(is_fake(p) for p in hollow.parameters())
    _, graphs, board = shard_all(hollow, inputs, 2, checkpoint=SafetensorsCheckpoint(tmp_path))
    with torch.no_grad():
        expected = main_output(model(**inputs))
    for out in run_all(graphs, inputs, board):
        assert (main_output(out) - expected).abs().max().item() < 1e-5


def test_a_model_without_memory_and_without_a_checkpoint_is_an_error():
    with empty_parameters():
        hollow = ZOO["gpt2"].build().eval()
    with pytest.raises(ShardError, match="has no memory; pass weights="):
        shard_all(hollow, ZOO["gpt2"].inputs(), 2)
