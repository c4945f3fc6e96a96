"""transformers' Trainer, by accelerate with DDP or, by `fsdp`, FSDP2: FOLDER [fsdp]; the losses of six steps."""

import json
import os
import sys

import torch
import transformers
from torch.utils.data import Dataset


class Tokens(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (i + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> list[float]:
    folder, options = sys.argv[1], {}
    if "fsdp" in sys.argv:
        options = {
            "fsdp": True,
            "fsdp_config": {
                "fsdp_version": 2,
                "reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            },
        }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        seed=0,
        dataloader_pin_memory=False,
        ddp_backend="gloo",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=Tokens())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":  # Trainer makes the process group itself
    losses = main()
    if os.environ["RANK"] == "0":
        print("RESULT", json.dumps([float(loss) for loss in losses]), flush=True)
    torch.distributed.destroy_process_group()
