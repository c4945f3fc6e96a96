"""Random folders of weights, as users have them: loaded as `from_pretrained` does, or refused where it guesses."""

import json
import random

import pytest
import torch
from lockstep import run_all, shard_all

from numadist.errors import ShardError
from numadist.pipeline.stages import checkpoint_of
from numadist.weights.fake import empty_parameters

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
from safetensors.torch import save_file

TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda tied: transformers.LlamaConfig(
        **TINY, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=tied
    ),
    "gpt2": lambda tied: transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=tied
    ),
    "mixtral": lambda tied: transformers.MixtralConfig(
        **TINY, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=tied
    ),
}
IDS = torch.arange(2, 12)[None]


def write_folder(folder, draw: random.Random) -> list[str]:
    """A folder that differs from what save_pretrained writes in one to three random ways; returns them."""
    name, tied = draw.choice(sorted(CONFIGS)), draw.random() < 0.5
    config = CONFIGS[name](tied)
    torch.manual_seed(draw.randrange(1000))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    done = [name, "tied" if tied else "untied"]
    if draw.random() < 0.5:
        model.save_pretrained(folder, max_shard_size=draw.choice(["20KB", "60KB"]))
        done.append("split over files")
    else:
        model.save_pretrained(folder)
    for change in draw.sample([_stray, _extra, _other_dtype, _renamed, _missing], draw.randint(0, 3)):
        change(folder, draw)
        done.append(change.__name__)
    return done


def _files(folder):
    return sorted(folder.glob("model*.safetensors"))


def _edit(path, edit) -> None:
    from safetensors.torch import load_file

    tensors = edit(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})
    index = path.parent / "model.safetensors.index.json"
    if index.exists():
        kept = json.loads(index.read_text())
        others = {k: v for k, v in kept["weight_map"].items() if v != path.name}
        kept["weight_map"] = {**others, **dict.fromkeys(tensors, path.name)}
        index.write_text(json.dumps(kept))


def _stray(folder, draw) -> None:
    """A file that no index names, with other values under the same names."""
    if (folder / "model.safetensors.index.json").exists():
        from safetensors.torch import load_file

        other = {k: torch.zeros_like(v) for k, v in load_file(draw.choice(_files(folder))).items()}
        save_file(
            other, folder / draw.choice(["a-stray.safetensors", "zz.safetensors"]), metadata={"format": "pt"}
        )


def _extra(folder, draw) -> None:
    _edit(draw.choice(_files(folder)), lambda t: {**t, "extra.weight": torch.ones(3)})


def _other_dtype(folder, draw) -> None:
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float64])
    _edit(draw.choice(_files(folder)), lambda t: {k: v.to(dtype) for k, v in t.items()})


def _renamed(folder, draw) -> None:
    """As saved from the model without its head: no prefix."""
    for path in _files(folder):
        _edit(
            path, lambda t: {k.removeprefix("model.").removeprefix("transformer."): v for k, v in t.items()}
        )


def _missing(folder, draw) -> None:
    path = draw.choice(_files(folder))

    def without_one(tensors):
        lost = draw.choice(sorted(tensors))
        return {k: v for k, v in tensors.items() if k != lost} or tensors

    _edit(path, without_one)


def check(folder, seed: int) -> str:
    done = write_folder(folder, random.Random(seed))
    told = f"seed {seed}: {', '.join(done)}"
    config = transformers.AutoConfig.from_pretrained(folder)
    with empty_parameters():
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    inputs = {"input_ids": IDS, "use_cache": False}
    try:
        plain, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError:  # it stacks experts, and one is missing
        plain, info = None, {"missing_keys": ["an expert"]}
    if info["missing_keys"]:
        with pytest.raises(ShardError, match=r"has no tensor named|experts.* has shape .* another model"):
            shard_all(empty, inputs, 2, checkpoint=checkpoint_of(folder, empty))
        return "refused"
    try:
        _, graphs, board = shard_all(empty, inputs, 2, checkpoint=checkpoint_of(folder, empty))
    except ShardError as error:
        pytest.fail(f"{told}: refused what from_pretrained loads whole: {error}")
    with torch.no_grad():
        wanted = plain(**inputs).logits
    for output in run_all(graphs, inputs, board):
        torch.testing.assert_close(output.logits, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: f"{told}: {m}")
    return "loaded"


@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        pytest.param(range(4, 40), marks=pytest.mark.slow),
        pytest.param(range(40, 2000), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_random_folders_load_as_from_pretrained(tmp_path, seeds):
    transformers.logging.set_verbosity_error()
    results = [check(tmp_path / str(seed), seed) for seed in seeds]
    assert len(seeds) < 10 or set(results) == {"loaded", "refused"}, results
