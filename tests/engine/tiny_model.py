"""Writes a tiny Qwen3 model (2 layers, random weights from a fixed seed) beside a real tokenizer.

tiny_model.py TOKENIZER_FOLDER OUT: runs in the environment that run.py installs.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def main(source, out):
    source, out = Path(source), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    tokenizer.save_pretrained(out)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
