"""What peers of the harness are given: GGUF files, and a model loaded once for every shape."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist import models
from numadist.compare.gguf_file import write_gguf
from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.peers import LlamaCpp
from numadist.compare.variants import CannotRun
from numadist.compare.worker_loop import OneShape
from numadist.errors import NumadistError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_transformers_reads_the_model_back_from_its_gguf_file(tmp_path, name, dtype):
    model = models.build(name, dtype)
    write_gguf(model, tmp_path / "model.gguf")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=model.config, dtype=dtype
    ).eval()
    inputs = models.prefill_inputs(model, 2, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


def test_a_model_that_we_write_no_file_of_is_named(tmp_path):
    with pytest.raises(CannotRun, match="not of bert"):
        write_gguf(models.build("bert-small", num_hidden_layers=1), tmp_path / "model.gguf")
    with pytest.raises(CannotRun, match="not of Linear"):
        write_gguf(torch.nn.Linear(2, 2), tmp_path / "model.gguf")


def test_an_interpreter_without_llama_cpp_ends_and_says_so(tmp_path, capfd):
    model = models.build("gpt2-tiny")
    with pytest.raises(NumadistError, match=r"llama\.cpp ended with exit code 1"):
        LlamaCpp(model, models.prefill_inputs(model, 1, 4), 1, sys.executable)
    assert "No module named 'llama_cpp'" in capfd.readouterr().err


@pytest.mark.parametrize("keeps_model", [True, False])
def test_the_model_is_loaded_once_if_it_is_kept(keeps_model):
    loaded = []

    def make(model, inputs):
        loaded.append(model)
        return model

    shapes = OneShape(ModelUnderTest("gpt2-tiny", "float32", longest=2048), make, keeps_model)
    for batch, seq in ((1, 8), (2, 8), (1, 2048)):
        run, inputs = shapes(batch, seq)
        assert run is loaded[-1]
        assert inputs["input_ids"].shape == (batch, seq)
    assert len({id(model) for model in loaded}) == (1 if keeps_model else 3)


def test_a_kept_model_too_short_for_a_shape_is_loaded_anew():
    shapes = OneShape(ModelUnderTest("gpt2-tiny", "float32"), lambda model, inputs: model)
    short, _ = shapes(1, 8)
    long, _ = shapes(1, 1500)
    assert long is not short
    assert long.config.n_positions == 1500


def test_what_runs_a_shape_is_closed_before_the_next():
    closed = []

    class Run:
        def close(self):
            closed.append(self)

    shapes = OneShape(ModelUnderTest("gpt2-tiny", "float32"), lambda model, inputs: Run())
    first, _ = shapes(1, 8)
    assert shapes(1, 8)[0] is first
    assert closed == []
    shapes(2, 8)
    assert closed == [first]
