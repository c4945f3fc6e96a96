"""vLLM's LLM on a random Llama: FOLDER ARGUMENTS; the greedy tokens. ARGUMENTS: more of LLM's, as JSON."""

import json
import os
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    folder, arguments = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        **arguments,
    )
    out = llm.generate(
        [{"prompt_token_ids": [1 + i, 5, 9, 11, 17 * i + 3]} for i in range(4)],
        SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True),
    )
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps([list(o.outputs[0].token_ids) for o in out]), flush=True)
