"""An OpenAI-compatible /v1/completions over pinned ranks, with streaming; standard library only.

    numarun --nproc-per-socket 2 examples/openai_server.py --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "The capital of France is", "max_tokens": 16, "stream": true}'

Rank 0 serves HTTP in threads and runs the engine in its main thread; the other ranks follow it. A client that hangs
up frees its row. An example, not a product: no authentication, no limits but the engine's own.
"""

import argparse
import itertools
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist

import numadist
from numadist import models

IDLE_S = 1.0  # the other ranks hear from rank 0 at least so often


class PendingRequest:
    """A request on its way between an HTTP thread and the engine."""

    def __init__(self, request: numadist.Request):
        self.request = request
        self.events: queue.Queue = queue.Queue()  # a token, an error text, or None at the end
        self.hung_up = False
        request.on_token = self.events.put


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address, tokenizer, options):
        super().__init__(address, Handler)
        self.tokenizer, self.options = tokenizer, options
        self.jobs: queue.Queue[PendingRequest] = queue.Queue()
        self.ids = itertools.count()
        self.stopping = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.reply(
                {"object": "list", "data": [{"id": self.server.options.model, "object": "model"}]}
            )
        self.fail(404, f"no {self.path}; there are /v1/completions and /v1/models")

    def do_POST(self) -> None:
        if self.path != "/v1/completions":
            return self.fail(404, f"no {self.path}; there is /v1/completions")
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            job = PendingRequest(self.request_of(asked))
        except (ValueError, TypeError, KeyError, AttributeError, numadist.GenerateError) as error:
            return self.fail(400, f"{type(error).__name__}: {error}")
        self.server.jobs.put(job)
        name = f"cmpl-{next(self.server.ids)}"
        try:
            self.stream(name, job) if asked.get("stream") else self.answer(name, job)
        except (BrokenPipeError, ConnectionResetError):
            job.hung_up = True

    def request_of(self, asked: dict) -> numadist.Request:
        """The engine's request; raises what a malformed one raises."""
        tokenizer, prompt = self.server.tokenizer, asked["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer(prompt)["input_ids"]
        temperature = float(asked.get("temperature", 1.0))
        how = numadist.Sampling(temperature > 0, temperature or 1.0, 50, float(asked.get("top_p", 1.0)))
        stop_ids = frozenset() if asked.get("ignore_eos") else frozenset([tokenizer.eos_token_id])
        deadline = time.perf_counter() + self.server.options.timeout_s
        return numadist.Request(
            list(map(int, prompt)), int(asked.get("max_tokens", 16)), how, stop_ids, deadline=deadline
        )

    def texts(self, job: PendingRequest):
        """New text after every token; pieces of a character wait until it is whole. Raises: GenerateError."""
        shown, tokens = "", []
        while (event := job.events.get()) is not None:
            if isinstance(event, str):
                raise numadist.GenerateError(event)
            if event not in job.request.stop_ids:
                tokens.append(event)
            text = self.server.tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text

    def answer(self, name: str, job: PendingRequest) -> None:
        try:
            text = "".join(self.texts(job))
        except numadist.GenerateError as error:
            return self.fail(400, str(error))
        used = {"prompt_tokens": len(job.request.prompt), "completion_tokens": len(job.request.tokens)}
        used["total_tokens"] = sum(used.values())
        self.reply({**self.chunk(name, text, job.request.finish_reason), "usage": used})

    def stream(self, name: str, job: PendingRequest) -> None:
        texts = self.texts(job)
        try:
            first = next(texts, "")
        except numadist.GenerateError as error:
            return self.fail(400, str(error))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for text in itertools.chain([first], texts):
            self.event(json.dumps(self.chunk(name, text, None)))
        self.event(json.dumps(self.chunk(name, "", job.request.finish_reason)))
        self.event("[DONE]")
        self.close_connection = True

    def chunk(self, name: str, text: str, finish_reason: str | None) -> dict:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
        about = {"id": name, "object": "text_completion", "created": int(time.time())}
        return {**about, "model": self.server.options.model, "choices": [choice]}

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def fail(self, code: int, message: str) -> None:
        self.reply({"error": {"message": message, "type": "invalid_request_error", "code": code}}, code)

    def reply(self, data: dict, code: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def run(engine: numadist.Engine, server: Server) -> None:
    """The engine's loop, until interrupted or told to stop."""
    running: list[PendingRequest] = []
    while not server.stopping.is_set():
        try:
            while True:
                job = server.jobs.get(block=not running, timeout=IDLE_S)
                try:
                    engine.submit(job.request)
                    running.append(job)
                except numadist.GenerateError as error:
                    job.events.put(str(error))
        except queue.Empty:
            pass
        if not engine.step():
            engine.runner.idle()
        for job in [j for j in running if j.hung_up or j.request.done]:
            engine.cancel(job.request)
            job.events.put(None)
            running.remove(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2", choices=["smollm2"], help="the model that has a tokenizer"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one request")
    options = parser.parse_args()
    dist.init_process_group("numa")
    model = models.build(options.model, getattr(torch, options.dtype))
    generator = numadist.Generator(model, max_length=options.max_length, compile=options.compile)
    if dist.get_rank() != 0:
        return generator.follow()
    server = Server((options.host, options.port), models.tokenizer(options.model), options)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving on http://{options.host}:{server.server_port}/v1/completions", flush=True)
    try:
        run(generator.engine(numadist.Policy.CHUNKED), server)
    except KeyboardInterrupt:
        generator.end()


if __name__ == "__main__":
    main()
