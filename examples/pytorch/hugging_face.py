"""A Hugging Face model under a memory budget, with an unchanged training loop.

Without arguments a tiny model with random weights is trained, so that this runs anywhere:

    python examples/pytorch/hugging_face.py
    python examples/pytorch/hugging_face.py --model Qwen/Qwen2.5-1.5B --vram 20GiB --batch 8    # on a GPU
"""

import argparse

import storm
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


def make_model(name):
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder")
    parser.add_argument("--vram", default="8MiB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = storm.wrap(make_model(args.model).to(device).train(), vram=args.vram)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(model.config.vocab_size, (args.batch, args.length), device=device)

    for step in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(storm.session(model).report())


if __name__ == "__main__":
    main()
