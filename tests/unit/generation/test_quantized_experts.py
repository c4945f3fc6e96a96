"""Mixtures of experts on codes, of a GGUF file and rounded while they are loaded, against widened weights."""

import copy
import functools

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")
gguf = pytest.importorskip("gguf", reason="needs the extra `models`")

import transformers
from quantized_files import add
from rank_threads import on_all, peers_of, prompts

from numadist import models
from numadist.generation.generator import Generator
from numadist.generation.step import capture_step
from numadist.kernels.quantized import quantize
from numadist.lowering.quantized import coded_weights, reads_codes
from numadist.pipeline.quantize import codes_of
from numadist.pipeline.stages import Site, checkpoint_of, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.placement import Shard
from numadist.weights.fake import empty_parameters
from numadist.weights.gguf_config import gguf_config
from numadist.weights.load import WeightsFile
from numadist.weights.slices import local_slice

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
KINDS = {"gate": "Q4_K", "up": "Q4_K", "down": "Q5_0"}
EXPERTS = torch.ops.numadist.quantized_experts.default


def qwen(**changes):
    sizes = {**SIZES, "moe_intermediate_size": 192, "num_experts": 5, **changes}
    return transformers.Qwen3MoeConfig(norm_topk_prob=True, **sizes)


def without_memory(dtype=torch.float32):
    with empty_parameters():
        return transformers.AutoModelForCausalLM.from_config(qwen(), dtype=dtype).eval()


@functools.cache
def step_of_file(dtype=torch.float32):
    return capture_step(without_memory(dtype))


def write(path, kinds):
    """A small Qwen3-MoE with random codes; its routers choose clearly, so that rounding changes no choice."""
    c = qwen()
    torch.manual_seed(models.SEED)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    for name in ("token_embd", "output"):
        add(writer, f"{name}.weight", "Q8_0", (c.vocab_size, c.hidden_size), 0.4)
    add(writer, "output_norm.weight", "F32", (c.hidden_size,))
    heads, kv, inner = c.num_attention_heads * 64, c.num_key_value_heads * 64, c.moe_intermediate_size
    for i in range(c.num_hidden_layers):
        block = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            add(writer, f"{block}{name}.weight", "F32", (c.hidden_size,))
        for name in ("attn_q_norm", "attn_k_norm"):
            add(writer, f"{block}{name}.weight", "F32", (64,))
        for name, num_out in (("attn_q", heads), ("attn_k", kv), ("attn_v", kv)):
            add(writer, f"{block}{name}.weight", "Q8_0", (num_out, c.hidden_size), 0.1)
        add(writer, f"{block}attn_output.weight", "Q8_0", (c.hidden_size, heads), 0.1)
        add(writer, f"{block}ffn_gate_inp.weight", "F16", (c.num_experts, c.hidden_size), 4.0)
        shapes = {
            "gate": (inner, c.hidden_size),
            "up": (inner, c.hidden_size),
            "down": (c.hidden_size, inner),
        }
        for name, shape in shapes.items():
            stacked = (c.num_experts, *shape)
            add(writer, f"{block}ffn_{name}_exps.weight", kinds[name], stacked, 2.0 / shape[1] ** 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "experts.gguf"
    write(path, KINDS)
    return path


def one_rank(path, quantization):
    step = copy.deepcopy(step_of_file())
    site = Site(0, None)
    checkpoint = checkpoint_of(path, without_memory())
    return localize(
        step.captured, build_schema(step.captured, 1), site, checkpoint, quantization
    ), step.layers


def logits(part, layers):
    """After 6 tokens in each of two rows."""
    tokens, positions = TOKENS, torch.arange(6).repeat(2, 1)
    kv = [[torch.zeros(2, k.num_heads, 16, k.key_size, dtype=k.dtype) for k in layers] for _ in range(2)]
    with torch.no_grad():
        return part.gm(tokens, positions, positions.clone(), *kv).float()


TOKENS = torch.tensor([[5, 77, 1, 300, 9, 2], [8, 8, 4, 511, 0, 3]])


def by_hugging_face(path):
    """Logits of transformers' model on the weights that the package gguf makes of the file."""
    tensors = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type)).view(*reversed(t.shape.tolist()))
        for t in gguf.GGUFReader(path).tensors
    }
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for i in range(SIZES["num_hidden_layers"]):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        for theirs, ours in names.items():
            state[f"{layer}{theirs}.weight"] = tensors[f"{block}{ours}.weight"]
        gate, up, down = (tensors[f"{block}ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        state[f"{layer}mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        state[f"{layer}mlp.experts.down_proj"] = down
    model = transformers.AutoModelForCausalLM.from_config(qwen()).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    with torch.no_grad():
        return model(TOKENS).logits[:, -1]


def continued(path, num_ranks, **options):
    ranks = [
        Generator.of_captured(
            without_memory(),
            copy.deepcopy(step_of_file()),
            peers,
            weights=path,
            quantization="auto",
            max_batch_size=4,
            max_length=64,
            **options,
        )
        for peers in peers_of(num_ranks)
    ]
    first, *others = on_all(ranks, lambda g: g.generate(prompts(5, 9, 2), max_new_tokens=10, eos_token_id=()))
    assert all(other == first for other in others)
    return first, [rank.local_bytes for rank in ranks]


def test_experts_of_a_file_stay_codes_and_compute_what_their_widened_weights_do(file):
    codes, layers = one_rank(file, "auto")
    plain, _ = one_rank(file, None)
    truth = by_hugging_face(file)
    torch.testing.assert_close(logits(plain, layers), truth, rtol=1e-4, atol=1e-4)
    assert (logits(codes, layers) - truth).norm() < 0.05 * truth.norm()
    assert sum(node.target is EXPERTS for node in codes.gm.graph.nodes) == 2 * 2
    assert codes.num_bytes < 1.1 * file.stat().st_size


def test_the_config_has_the_sizes_of_the_files_experts(file):
    config = gguf_config(file)
    assert config.model_type == "qwen3_moe"
    assert (config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok) == (192, 5, 2)


def test_any_number_of_ranks_generates_the_same_tokens_with_its_slice_of_each_expert(file):
    alone, (whole,) = continued(file, 1)
    assert len({token for row in alone for token in row}) > 8, "the model is too dull to test with"
    for num_ranks in (2, 3):  # cuts lie between groups of 32, so that all round alike
        tokens, held = continued(file, num_ranks)
        assert tokens == alone, f"{num_ranks} ranks"
        if num_ranks == 2:
            assert max(held) < 0.6 * whole  # the table and the head are too short to be cut


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_reads_its_slices_of_the_files_experts(file, num_ranks):
    step = step_of_file()
    shards = build_schema(step.captured, num_ranks).param_shards()
    checkpoint = checkpoint_of(file, without_memory())
    weights = WeightsFile(checkpoint, step.captured.tied_names, step.captured.persistent_buffers)
    experts = [w for w in coded_weights(step.gm) if w.num_experts > 1]
    assert len(experts) == 2 * 2
    for weight in experts:
        shard = next(shards[n] for n in weight.names if n in shards)
        for rank in range(num_ranks):
            wanted = torch.empty(shard.local_shape(weight.parameter.shape, rank))
            checkpoint.read_into(wanted, checkpoint.found(weight.names), shard, rank)
            part = codes_of(weight, shard, rank, weights, None).widened()
            assert torch.equal(part.view_as(wanted), wanted), weight.names


def test_compiled_steps_run_on_the_same_codes(file):
    assert continued(file, 1, compile=True)[0] == continued(file, 1)[0]


def test_gates_and_what_they_weigh_in_different_formats_are_widened_and_told(tmp_path, caplog):
    write(tmp_path / "m.gguf", {**KINDS, "up": "Q5_K"})
    codes, layers = one_rank(tmp_path / "m.gguf", "auto")
    assert "2 quantized tensors are widened" in caplog.text
    assert "mlp.experts.gate_up_proj" in caplog.text
    truth = by_hugging_face(tmp_path / "m.gguf")
    assert (logits(codes, layers) - truth).norm() < 0.05 * truth.norm()


@functools.cache
def mixtral():
    torch.manual_seed(models.SEED)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, initializer_range=0.1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(20)
    return model


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_experts_rounded_while_they_are_loaded_are_those_rounded_before(quantization, bits):
    rounded_before = copy.deepcopy(mixtral())
    with torch.no_grad():
        for name, w in rounded_before.named_parameters():
            if w.dim() > 1 and not name.endswith("mlp.gate.weight"):
                its_bits = 8 if name in ("model.embed_tokens.weight", "lm_head.weight") else bits
                w.copy_(quantize(w.reshape(-1, w.shape[-1]), its_bits).widened().view_as(w))
        truth = rounded_before(TOKENS).logits[:, -1]
    step = capture_step(mixtral())
    part = localize(step.captured, build_schema(step.captured, 1), Site(0, None), None, quantization)
    assert sum(reads_codes(node) for node in part.gm.graph.nodes) == 2 * 6 + 2  # not the routers
    assert (logits(part, step.layers) - truth).norm() < 0.08 * truth.norm()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_round_experts_by_the_same_groups_however_they_are_cut(num_ranks):
    step = capture_step(mixtral())
    shards = build_schema(step.captured, num_ranks).param_shards()
    experts = [w for w in coded_weights(step.gm) if w.num_experts > 1]
    assert len(experts) == 2 * 2
    for weight in experts:
        shard = next((shards[n] for n in weight.names if n in shards), Shard({}))
        assert shard.dims, "an expert is whole: nothing was tested"
        w = weight.parameter.detach()
        wanted = quantize(w.reshape(-1, w.shape[-1]), 4).widened().view_as(w)
        for rank in range(num_ranks):
            part = codes_of(weight, shard, rank, None, 4).widened()
            local = local_slice(wanted, shard, rank)
            assert torch.equal(part.view_as(local), local), weight.names
