"""Generation on the codes of a file, and on weights rounded while they are loaded, against the widened weights."""

import copy
import functools
import logging
import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")
pytest.importorskip("gguf", reason="needs the extra `models`")

from packed_layers import layer
from quantized_files import MIXED, without_memory, write
from rank_threads import LIVELY, captured, on_all, peers_of, prompts, tiny
from safetensors.torch import save_file

from numadist import models
from numadist.errors import ShardError
from numadist.generation.generator import Generator
from numadist.generation.pretrained import open_pretrained
from numadist.generation.step import capture_step
from numadist.kernels.quantized import quantize
from numadist.lowering.quantized import coded_weights, reads_codes
from numadist.lowering.recorded_step import ReplayedStep
from numadist.pipeline.quantize import codes_of
from numadist.pipeline.stages import Site, checkpoint_of, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.placement import Shard
from numadist.weights.slices import local_slice


@functools.cache
def step_of_file(dtype):
    return capture_step(without_memory(dtype))


def generators(path, num_ranks, dtype=torch.float32, **options):
    options = {"max_batch_size": 4, "max_length": 64, "quantization": "auto", **options}
    return [
        Generator.of_captured(
            without_memory(dtype), copy.deepcopy(step_of_file(dtype)), peers, weights=path, **options
        )
        for peers in peers_of(num_ranks)
    ]


def continued(ranks, *lengths):
    def work(generator):
        return generator.generate(prompts(*lengths), max_new_tokens=12, eos_token_id=())

    first, *others = on_all(ranks, work)
    assert all(other == first for other in others)
    return first


def logits(part, layers):
    """After 6 tokens in each of two rows."""
    tokens, positions = (
        torch.tensor([[5, 77, 1, 300, 9, 2], [8, 8, 4, 511, 0, 3]]),
        torch.arange(6).repeat(2, 1),
    )
    kv = [[torch.zeros(2, k.num_heads, 16, k.key_size, dtype=k.dtype) for k in layers] for _ in range(2)]
    with torch.no_grad():
        return part.gm(tokens, positions, positions.clone(), *kv).float()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "mixed.gguf"
    write(path)
    return path


def one_rank(path, quantization, dtype=torch.float32):
    step = copy.deepcopy(step_of_file(dtype))
    schema = build_schema(step.captured, 1)
    return localize(
        step.captured, schema, Site(0, None), checkpoint_of(path, without_memory(dtype)), quantization
    ), step.layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_formats_of_a_file_compute_what_their_widened_weights_do(mixed, dtype):
    codes, layers = one_rank(mixed, "auto", dtype)
    plain, _ = one_rank(mixed, None, dtype)
    seen, wanted = logits(codes, layers), logits(plain, layers)
    assert (seen - wanted).norm() < 0.05 * wanted.norm()
    assert not torch.equal(seen, wanted)
    users = [n for n in codes.gm.graph.nodes if reads_codes(n)]
    assert len(users) == 4 * 7 - 2 + 2  # of two layers one product is plain; the table and the head
    assert codes.num_bytes < 0.4 * plain.num_bytes * 4 / dtype.itemsize


def test_a_rank_holds_the_files_bytes_and_little_more(tmp_path):
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")
    for kind in kinds:
        layer = dict.fromkeys(MIXED[0], kind)
        write(tmp_path / f"{kind}.gguf", (layer,))
        part, _ = one_rank(tmp_path / f"{kind}.gguf", "auto")
        assert part.num_bytes < 1.1 * (tmp_path / f"{kind}.gguf").stat().st_size, kind


def test_any_number_of_ranks_generates_the_same_tokens(mixed):
    alone = continued(generators(mixed, 1), 5, 9, 2)
    assert len({token for row in alone for token in row}) > 20, "the model is too dull to test with"
    for num_ranks in (2, 3, 4):
        ranks = generators(mixed, num_ranks)
        assert continued(ranks, 5, 9, 2) == alone, f"{num_ranks} ranks"


def test_two_ranks_hold_half_each(mixed):
    (whole,) = generators(mixed, 1)
    halves = generators(mixed, 2)
    assert max(half.local_bytes for half in halves) < 0.55 * whole.local_bytes


def test_a_row_gets_the_same_tokens_alone_and_in_a_batch(mixed):
    ranks = generators(mixed, 2)
    assert [continued(ranks, n)[0] for n in (5, 9, 2)] == continued(ranks, 5, 9, 2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_rounded_while_they_are_loaded_are_those_rounded_before(name, quantization, bits):
    rounded_before = copy.deepcopy(tiny(name))
    with torch.no_grad():
        for key, w in rounded_before.named_parameters():
            if w.dim() == 2:
                conv1d = name == "gpt2" and key.split(".")[-2].startswith("c_")
                across = w.t() if conv1d else w
                sensitive = any(word in key for word in ("wte", "wpe", "embed", "lm_head"))
                across.copy_(quantize(across, 8 if sensitive else bits).widened())
    exact = capture_step(rounded_before)
    step = copy.deepcopy(captured(name))
    schema = build_schema(step.captured, 1)
    part = localize(step.captured, schema, Site(0, None), None, quantization)
    wanted = localize(exact.captured, build_schema(exact.captured, 1), Site(0, None))
    seen, truth = logits(part, step.layers), logits(wanted, step.layers)
    assert (seen - truth).norm() < 0.08 * truth.norm()
    assert part.num_bytes < (0.4 if bits == 8 else 0.27) * wanted.num_bytes


@pytest.mark.parametrize(("name", "num_ranks"), [("gpt2", 2), ("llama", 2), ("llama", 3)])
def test_ranks_round_by_the_same_groups_however_they_are_cut(name, num_ranks):
    step = captured(name)
    shards = build_schema(step.captured, num_ranks).param_shards()
    num_cut = 0
    for weight in coded_weights(step.gm):
        shard = next((shards[n] for n in weight.names if n in shards), Shard({}))
        whole = weight.parameter.detach()
        rounded = quantize(whole.t() if weight.is_transposed else whole, 4).widened()
        wanted = rounded.t() if weight.is_transposed else rounded
        for rank in range(num_ranks):
            part = codes_of(weight, shard, rank, None, 4)
            seen = part.widened().t() if weight.is_transposed else part.widened()
            assert torch.equal(seen, local_slice(wanted, shard, rank)), weight.names
            num_cut += part.order is not None
    assert num_cut, "no cut falls inside a group: nothing was tested"


def test_compiled_steps_run_on_the_same_codes(mixed):
    eager, compiled = generators(mixed, 1), generators(mixed, 1, compile=True)
    assert compiled[0].local_bytes <= eager[0].local_bytes * 1.01
    assert continued(compiled, 5, 9) == continued(eager, 5, 9)
    steps = compiled[0].runner._forward._ready
    assert [type(step) for (_, one_token, _), step in steps.items() if one_token] == [ReplayedStep]


def test_a_damaged_scale_names_its_tensor(mixed, tmp_path):
    from numadist.weights.gguf_header import read_header

    tensor = next(t for t in read_header(mixed).tensors if t.name == "blk.1.attn_q.weight")
    raw = bytearray(mixed.read_bytes())
    raw[tensor.data_offset : tensor.data_offset + 2] = b"\xff\x7f"  # NaN
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ShardError, match=r"bad.gguf: blk.1.attn_q.weight has scales that are no numbers"):
        one_rank(tmp_path / "bad.gguf", "auto")


def test_rows_that_are_no_whole_blocks_are_named(tmp_path):
    write(tmp_path / "m.gguf", ({**MIXED[0], "attn_q": "Q4_0"},))
    raw = (tmp_path / "m.gguf").read_bytes()
    place = raw.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4
    (tmp_path / "m.gguf").write_bytes(raw[:place] + (250).to_bytes(8, "little") + raw[place + 8 :])
    with pytest.raises(
        ShardError, match=r"blk.0.attn_q.weight has rows of 250 numbers in Q4_0, whose blocks have 32"
    ):
        one_rank(tmp_path / "m.gguf", "auto")


def test_weights_without_codes_stay_as_they_are_and_are_told(caplog):
    model = copy.deepcopy(tiny("gpt2"))
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(1e-6)
    step = capture_step(model)
    part = localize(step.captured, build_schema(step.captured, 1), Site(0, None), None, "int8")
    assert re.search(r"h.0.mlp.c_fc.weight stays as it is: scales in f16 do not fit", caplog.text)
    assert sum(reads_codes(node) for node in part.gm.graph.nodes) == 2 * 4 - 1 + 3  # two tables, the head


def test_what_is_not_offered_is_an_error():
    with pytest.raises(ShardError, match="quantization must be auto, int8, int4 or None, got 'int3'"):
        Generator.of_captured(
            tiny("llama"), copy.deepcopy(captured("llama")), peers_of(1)[0], quantization="int3"
        )


@pytest.mark.parametrize(
    ("method", "config"), [("gptq", {"bits": 4}), ("awq", {"bits": 4, "version": "gemm"})]
)
def test_folders_of_other_tools_generate_alike_on_any_number_of_ranks(method, config, tmp_path):
    model = models.build(
        "llama-tiny",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        **LIVELY,
    )
    state = {}
    for key, tensor in model.state_dict().items():
        owner = key.removesuffix(".weight")
        if not owner.endswith("_proj"):
            state[key] = tensor.half()
            continue
        pieces, _ = layer(method, *tensor.shape, group=64, act_order=method == "gptq")
        state |= {f"{owner}.{name}": piece for name, piece in pieces.items()}
    save_file(state, tmp_path / "model.safetensors")
    model.config.quantization_config = {"quant_method": method, **config}
    model.config.dtype = torch.float16
    model.config.save_pretrained(tmp_path)
    answers = []
    for num_ranks, quantization in ((1, "auto"), (2, "auto"), (1, None)):
        found = open_pretrained(tmp_path)
        step = capture_step(found.model)
        ranks = [
            Generator.of_captured(
                found.model,
                copy.deepcopy(step),
                peers,
                max_length=64,
                weights=tmp_path,
                quantization=quantization,
            )
            for peers in peers_of(num_ranks)
        ]
        answers.append((continued(ranks, 5, 9), sum(rank.local_bytes for rank in ranks)))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] < 0.75 * answers[2][1]


def test_what_is_widened_is_told(tmp_path, caplog):
    write(tmp_path / "m.gguf", ({**MIXED[1], "attn_q": "Q2_K", "ffn_up": "IQ4_NL"},))
    with caplog.at_level(logging.INFO, "numadist"):
        part, layers = one_rank(tmp_path / "m.gguf", "auto")
    assert "12 quantized tensors are widened to 7 MB over all ranks" in caplog.text
    assert "mlp.down_proj.weight" in caplog.text
    assert "weights that stay codes: " in caplog.text
    plain, _ = one_rank(tmp_path / "m.gguf", None)
    seen, wanted = logits(part, layers), logits(plain, layers)
    assert (seen - wanted).norm() < 0.05 * wanted.norm()
