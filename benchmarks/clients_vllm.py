"""One run of clients.py: vLLM on a random Llama. FOLDER WORKERS; milliseconds a token at batch 1 and 8, as JSON."""

import json
import sys
import time

NUM_TOKENS = 32

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        tensor_parallel_size=int(sys.argv[2]),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )

    def seconds(batch: int, num_tokens: int) -> float:
        prompts = [{"prompt_token_ids": [1 + i, 5, 9, 11, 17 * i + 3]} for i in range(batch)]
        how = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, how, use_tqdm=False)
        return time.perf_counter() - begin

    ms = {}
    for batch in (1, 8):
        seconds(batch, NUM_TOKENS)
        # Prompts are read in the first step, so it is taken off.
        ms[f"batch {batch}"] = min(
            1e3 * (seconds(batch, 1 + NUM_TOKENS) - seconds(batch, 1)) / NUM_TOKENS for _ in range(4)
        )
    print("RESULT", json.dumps(ms), flush=True)
