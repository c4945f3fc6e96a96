"""transformers finds the same config and tokenizer in a GGUF file through our reader as through its own."""

import threading

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")
gguf = pytest.importorskip("gguf", reason="needs the extra `models`")

from transformers import AutoConfig, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as theirs

from numadist import models
from numadist.weights.gguf_config import gguf_config, gguf_tokenizer, quick_reader

TABLES = theirs.GGUF_TO_TRANSFORMERS_MAPPING["config"]
# Spelled in files as llama.cpp does, not as the tables do.
SPELLED = {
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "minimax_m2": "minimax-m2",
    "umt5": "t5",
    "mistral": "llama",
}
ARCHITECTURES = sorted(set(TABLES) - {"general", "tokenizer"})
REALS = "freq_base", "epsilon", "scale", "factor", "softcapping"


def written(path, architecture, **fields):
    """A file of an architecture, with a value for each key that transformers knows of it."""
    spelled = SPELLED.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, spelled)
    writer.add_string("general.name", f"A {architecture} of a test")
    for place, key in enumerate(TABLES[architecture], 1):
        name = f"{spelled}.{key}"
        if key.endswith(REALS):
            writer.add_float32(name, 0.5 * place)
        elif key.endswith("head_count_kv") and architecture == "lfm2":
            writer.add_array(name, [0, 0, 4, 0, 4])
        elif key.startswith("attention.head_count"):
            writer.add_uint32(name, 4)
        elif not key.startswith("rope.scaling") or key.endswith("length"):
            writer.add_uint32(name, 8 * place)
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9", "\u00e4\u00f6 ", "ab", "a\u00e9"])
    writer.add_array("tokenizer.ggml.merges", ["a b", "a \u00e9"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 3, 1])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_tensor("token_embd.weight", gguf.quants.np.zeros((5, 8), gguf.quants.np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_that_transformers_reads_is_alike(tmp_path, architecture):
    path = tmp_path / "m.gguf"
    written(path, architecture, add_bos_token=True)
    truth = theirs.load_gguf_checkpoint(path)
    del truth["ignore"]  # the format's version, and counts
    with quick_reader(path, vocabulary=True):
        assert theirs.load_gguf_checkpoint(path) == {**truth, "ignore": {}}
    with quick_reader(path, vocabulary=False):
        assert theirs.load_gguf_checkpoint(path)["config"] == truth["config"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "stablelm"])
def test_a_config_is_autoconfigs(tmp_path, architecture):
    path = tmp_path / "m.gguf"
    written(path, architecture)
    truth = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    ours = gguf_config(path)
    assert type(ours) is type(truth)
    assert ours.to_dict() == truth.to_dict()


@pytest.mark.slow
def test_the_packaged_models_config_and_tokenizer_are_alike():
    path = models.smollm2_path()
    arguments = {"gguf_file": path.name, "local_files_only": True}
    assert gguf_config(path).to_dict() == AutoConfig.from_pretrained(path.parent, **arguments).to_dict()
    ours, truth = gguf_tokenizer(path), AutoTokenizer.from_pretrained(path.parent, **arguments)
    assert ours.backend_tokenizer.to_str() == truth.backend_tokenizer.to_str()
    assert ours.init_kwargs == truth.init_kwargs
    assert ours.chat_template == truth.chat_template


def test_only_the_file_and_the_thread_are_read_so(tmp_path):
    path, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    written(path, "llama")
    written(other, "llama")
    original, seen = gguf.GGUFReader, {}
    with quick_reader(path, vocabulary=False):
        seen["here"] = gguf.GGUFReader(path)
        seen["another file"] = gguf.GGUFReader(other)
        thread = threading.Thread(target=lambda: seen.update(thread=gguf.GGUFReader(path)))
        thread.start()
        thread.join()
    assert gguf.GGUFReader is original
    assert {where: type(reader) is original for where, reader in seen.items()} == {
        "here": False,
        "another file": True,
        "thread": True,
    }
