"""Generator.from_pretrained: what from_pretrained of transformers loads, or a sentence that names what it is not."""

import gc
import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

import numadist
from numadist.errors import GenerateError, NumadistError
from numadist.generation.pretrained import load_tokenizer, open_pretrained

CONFIG = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, intermediate_size=48, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_generates_as_from_pretrained_does(folder):
    ids = torch.arange(3, 9)[None]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = numadist.Generator.from_pretrained(folder, torch.float32, max_length=32)
    assert torch.equal(ours.generate(ids), plain.generate(ids)), "7 tokens, as its generation_config says"


def test_the_dtype_is_the_configs_unless_asked(folder):
    assert {p.dtype for p in open_pretrained(folder).model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in open_pretrained(folder, torch.float16).model.parameters()} == {torch.float16}


def test_garbage_is_not_looked_for_while_a_generator_is_made(folder, monkeypatch):
    seen = []

    def runner(*args, **kwargs):
        seen.append(gc.isenabled())
        raise KeyError

    monkeypatch.setattr("numadist.generation.generator.Runner", runner)
    with pytest.raises(KeyError):
        numadist.Generator.from_pretrained(folder)
    assert (seen, gc.isenabled()) == ([False], True)


def _without_config(folder):
    (folder / "config.json").unlink()
    (folder / "a.gguf").write_bytes(b"")
    return folder


def _quantized(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _encoder(folder):
    transformers.ViTConfig().save_pretrained(folder)
    return folder


def _no_gguf(folder):
    (folder / "a.gguf").write_bytes(b"no model")
    return folder / "a.gguf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none", r"none is not there; a model is a folder"),
        (lambda folder: folder / "config.json", r"config.json is neither a folder nor a .gguf file"),
        (_without_config, r"has no config.json; of its GGUF files take one: a.gguf"),
        (_quantized, r"is quantized by bitsandbytes; numadist reads GGUF files, AWQ of 4 bits, GPTQ"),
        (_encoder, r"ViTConfig is no causal language model"),
        (_no_gguf, r"a.gguf: no config that transformers reads"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_model_is_told(folder, change, message):
    with pytest.raises(NumadistError, match=message):
        open_pretrained(change(folder))


def test_a_folder_without_a_tokenizer_is_told(folder):
    with pytest.raises(GenerateError, match="no tokenizer that transformers reads"):
        load_tokenizer(folder)
