"""A real encoder from its package: sentence embeddings of the sharded model equal those of the unsharded one."""

import pytest
import torch
from lockstep import local_fraction, run_all, shard_all

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist import models
from numadist.errors import NumadistError
from numadist.weights.fake import empty_parameters
from numadist.weights.safetensors import SafetensorsCheckpoint

SENTENCES = ["A server with two sockets.", "A computer that has two processors.", "Bananas are yellow."]


@pytest.fixture(scope="module")
def folder():
    try:
        return models.minilm_folder()
    except NumadistError as missing:
        pytest.skip(str(missing))


def embeddings(hidden_BSD, mask_BS):
    """Mean over the tokens that are no padding, length 1, as sentence-transformers does it."""
    weights_BS1 = mask_BS[..., None].float()
    return torch.nn.functional.normalize((hidden_BSD * weights_BS1).sum(1) / weights_BS1.sum(1), dim=1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sentence_embeddings_match(folder, num_ranks):
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected_BD = embeddings(model(**inputs).last_hidden_state, inputs["attention_mask"])
    with empty_parameters():
        hollow = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    _, graphs, board = shard_all(hollow, inputs, num_ranks, checkpoint=SafetensorsCheckpoint(folder))
    for out in run_all(graphs, inputs, board):
        seen_BD = embeddings(out.last_hidden_state, inputs["attention_mask"])
        assert (seen_BD - expected_BD).abs().max().item() < 1e-5
    assert expected_BD[0] @ expected_BD[1] > expected_BD[0] @ expected_BD[2], (
        "the model knows what a server is"
    )
    assert local_fraction(graphs, model) < 1 / num_ranks + 0.05
