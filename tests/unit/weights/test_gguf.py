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
from numadist.weights.fake import empty_parameters
from numadist.weights.gguf import GgufCheckpoint
from numadist.weights.slices import local_slice


@pytest.fixture(scope="module")
def smollm2():
    """The model as transformers loads it, and the file opened for a model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = models.build("smollm2")
    with contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(models.smollm2_folder(), gguf_file=models.SMOLLM2_FILE)
    with empty_parameters():
        hollow = AutoModelForCausalLM.from_config(config)
    return whole, GgufCheckpoint(models.smollm2_path(), hollow)


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
