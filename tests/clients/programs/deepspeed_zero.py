"""DeepSpeed: `tp` is init_inference with automatic tensor parallelism, 1 to 3 a stage of ZeRO; what it computes."""

import json
import os
import sys

import deepspeed
import torch
import transformers


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def split() -> list[float]:
    engine = deepspeed.init_inference(
        model().eval(),
        tensor_parallel={"tp_size": 2},
        dtype=torch.float32,
        replace_with_kernel_inject=False,
    )
    with torch.no_grad():
        return engine(torch.arange(8)[None]).logits.flatten().tolist()


def train(stage: int) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    losses = []
    for step in range(5):
        ids = ((torch.arange(32) * (step + 1 + deepspeed.comm.get_rank())) % 64).reshape(2, 16)
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    said = split() if sys.argv[1] == "tp" else train(int(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print("RESULT", json.dumps(said), flush=True)
    torch.distributed.destroy_process_group()
