"""A GGUF file read by slices equals the slices of the model transformers makes of it."""

import contextlib
import io

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")
pytest.importorskip("gguf", reason="needs the extra `models`")

from numadist import models
from numadist.errors import ShardError
from numadist.sharding.placement import DimShard, Shard
from numadist.weights.gguf import GgufCheckpoint
from numadist.weights.gguf_header import read_header
from numadist.weights.slices import local_slice


@pytest.fixture(scope="module")
def smollm2():
    """The model as transformers loads it, and the file opened for a model without memory."""
    from transformers import AutoModelForCausalLM

    folder = models.smollm2_folder()
    with contextlib.redirect_stderr(io.StringIO()):
        whole = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=models.SMOLLM2_FILE, dtype=torch.float32
        )
    return whole.eval(), GgufCheckpoint(models.smollm2_path(), models.smollm2_without_memory())


@pytest.mark.slow
def test_the_packaged_model_is_what_transformers_makes_of_it(smollm2):
    whole, _ = smollm2
    ours = models.build("smollm2")
    seen, truth = ours.state_dict(), whole.state_dict()
    assert seen.keys() == truth.keys()
    assert all(torch.equal(seen[name], truth[name]) for name in truth)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    own = "_model_name_or_path", "_name_or_path", "quantization_config", "unk_token_id"
    configs = [{k: v for k, v in m.config.to_dict().items() if k not in own} for m in (ours, whole)]
    assert configs[0] == configs[1]
    assert ours.generation_config.to_dict() == whole.generation_config.to_dict()
    assert not ours.training


def cut_in_two(shape, dim, at):
    return Shard({dim: DimShard((((0, at),), ((at, shape[dim]),)))})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim", "at"),
    [
        ("model.embed_tokens.weight", 0, 20_000),  # read row by row
        ("model.layers.3.self_attn.q_proj.weight", 0, 320),  # rearranged in the file
        ("model.layers.3.self_attn.k_proj.weight", 0, 64),
        ("model.layers.3.self_attn.o_proj.weight", 1, 320),
        ("model.layers.29.mlp.down_proj.weight", 1, 704),
        ("model.layers.0.input_layernorm.weight", None, None),
    ],
)
def test_slices_equal_those_of_the_whole_model(smollm2, name, dim, at):
    whole, checkpoint = smollm2
    full = dict(whole.named_parameters())[name].detach()
    shard = Shard({}) if dim is None else cut_in_two(full.shape, dim, at)
    for rank in range(2):
        out = torch.full(shard.local_shape(full.shape, rank), torch.nan)
        checkpoint.read_into(out, checkpoint.find([name]), shard, rank)
        assert torch.equal(out, local_slice(full, shard, rank)), f"{name} on rank {rank}"


@pytest.mark.slow
def test_every_parameter_is_found(smollm2):
    whole, checkpoint = smollm2
    assert {name for name, _ in whole.named_parameters()} <= set(checkpoint.names())


@pytest.mark.slow
def test_another_models_shapes_are_refused(smollm2):
    _, checkpoint = smollm2
    with pytest.raises(ShardError, match=r"q_proj.weight has shape \(576, 576\)"):
        checkpoint.read_into(torch.empty(4, 4), "model.layers.0.self_attn.q_proj.weight", Shard({}), 0)


def test_no_gguf_file_is_a_clear_error(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not gguf at all, but long enough to be read")
    with pytest.raises(ShardError, match="is no GGUF file"):
        GgufCheckpoint(tmp_path / "m.gguf", models.build("llama-tiny"))


def small_file(path):
    """A GGUF file with fields and lists of several types, and two tensors."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "a name")
    writer.add_array("tokenizer.ggml.tokens", ["one", "", "three"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", np.arange(7, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_header_is_read_as_the_package_gguf_reads_it(tmp_path):
    import gguf

    small_file(tmp_path / "m.gguf")
    header, theirs = read_header(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for name in ("general.architecture", "llama.block_count", "llama.rope.freq_base", "general.name"):
        assert header.fields[name] == theirs.fields[name].contents()
    assert header.fields["tokenizer.ggml.add_bos_token"] is True
    assert header.lists == {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 2}
    assert read_header(tmp_path / "m.gguf", lambda key: key.endswith("s")).lists == {
        key: theirs.fields[key].contents() for key in header.lists
    }
    seen = [(t.name, t.shape, t.tensor_type, t.n_bytes, t.data_offset) for t in header.tensors]
    assert seen == [
        (t.name, tuple(map(int, t.shape)), t.tensor_type, t.n_bytes, t.data_offset) for t in theirs.tensors
    ]


def test_a_header_with_any_byte_changed_is_read_or_refused(tmp_path):
    """It may be a sound header then, of other names or numbers; but never one that needs more than the file."""
    small_file(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    end = min(tensor.data_offset for tensor in read_header(tmp_path / "m.gguf").tensors)
    refused = 0
    for at in range(end):
        for value in {0, 0x7F, 0xFF, whole[at] ^ 1} - {whole[at]}:
            (tmp_path / "m.gguf").write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                tensors = read_header(tmp_path / "m.gguf").tensors
            except ShardError:
                refused += 1
                continue
            assert all(tensor.data_offset + tensor.n_bytes <= len(whole) for tensor in tensors)
    assert refused > end


def test_a_file_cut_off_anywhere_is_a_clear_error(tmp_path):
    small_file(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    end = max(t.data_offset + t.n_bytes for t in read_header(tmp_path / "m.gguf").tensors)
    for size in range(end):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ShardError, match="is no GGUF file"):
            read_header(tmp_path / "cut.gguf")
