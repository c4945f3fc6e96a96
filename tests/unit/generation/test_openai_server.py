"""examples/openai_server.py over one rank and a tiny model: answers, streams, refuses, and frees rows."""

import argparse
import http.client
import importlib.util
import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import generators, hugging_face, prompts

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "openai_server.py"


class Words:
    """A tokenizer whose tokens are numbers: `12 7 ` is [12, 7]."""

    eos_token_id = 511

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens):
        return "".join(f"{token} " for token in tokens)


@pytest.fixture(scope="module")
def served():
    """(port, engine) of a running server."""
    spec = importlib.util.spec_from_file_location("openai_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (generator,) = generators("llama", 1)
    engine = generator.engine()
    server = module.Server(("127.0.0.1", 0), Words(), argparse.Namespace(model="tiny", timeout_s=300.0))
    loops = [
        threading.Thread(target=server.serve_forever),
        threading.Thread(target=module.run, args=(engine, server)),
    ]
    for loop in loops:
        loop.start()
    yield server.server_port, engine
    server.stopping.set()
    server.shutdown()
    for loop in loops:
        loop.join()
    server.server_close()


def post(port, **asked):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(asked))
    response = connection.getresponse()
    return response.status, response.read().decode()


def text_of(length, count):
    return Words().decode(hugging_face("llama", length, 24)[:count])


@pytest.mark.parametrize("as_text", [True, False], ids=["text", "token ids"])
def test_a_completion_is_the_models(served, as_text):
    (prompt,) = prompts(9)
    status, body = post(
        served[0], prompt=Words().decode(prompt) if as_text else prompt, max_tokens=7, temperature=0
    )
    answer = json.loads(body)
    assert status == 200, body
    assert answer["choices"][0]["text"] == text_of(9, 7)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}


def test_a_stream_brings_one_event_a_token_and_ends(served):
    (prompt,) = prompts(5)
    status, body = post(served[0], prompt=prompt, max_tokens=6, temperature=0, stream=True)
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert status == 200
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == text_of(5, 6)
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": 3}, "prompt"),
        ({"prompt": [1], "max_tokens": 9999}, "9999 new ones are more than"),
        ({"prompt": []}, "a prompt has no token"),
        ({"prompt": [1], "top_p": 0}, "top_p must be above 0"),
        ({"prompt": [1], "max_tokens": 9999, "stream": True}, "9999 new ones are more than"),
    ],
)
def test_a_bad_request_is_told_why(served, asked, message):
    status, body = post(served[0], **asked)
    assert status == 400
    assert message in json.loads(body)["error"]["message"]


def test_requests_at_a_time_share_the_engine(served):
    lengths = (5, 17, 1, 9, 23)
    answers = {}

    def ask(length):
        answers[length] = post(served[0], prompt=prompts(length)[0], max_tokens=24, temperature=0)[1]

    threads = [threading.Thread(target=ask, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length in lengths:
        assert json.loads(answers[length])["choices"][0]["text"] == text_of(length, 24)
    assert served[1].rows_in_use == 0
