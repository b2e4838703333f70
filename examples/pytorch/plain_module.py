"""A plain `nn.Module` whose activations wait in host memory between forward and backward.

    python examples/pytorch/plain_module.py
    python examples/pytorch/plain_module.py --vram 2GiB --width 4096 --batch 8192    # on a GPU
"""

import argparse

import storm
import torch
from torch import nn


def make_model(width: int, layers: int) -> nn.Module:
    def block() -> nn.Module:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    return nn.Sequential(*[block() for _ in range(layers)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vram", default="8MiB")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model(args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(args.batch, args.width, device=device)
    target = x.roll(1, dims=1)

    for step in range(10):
        with storm.offload(vram=args.vram) as s:
            loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(s.report())


if __name__ == "__main__":
    main()
