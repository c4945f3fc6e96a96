"""Write a random Llama and a tokenizer of 256 words: FOLDER."""

import sys

import tokenizers
import torch
import transformers


def write(folder: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.4,  # so that next tokens are far from a tie
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w2")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1", unk_token="w2"
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
