"""PyTorch's side of `cargo xtask bench cpu`: trains a small GPT eagerly and times the steps.

The model is GPT-2's: learned positions, biases, pre-norm, GELU (tanh), tied embeddings. It is in
f32 (`f32`); in bf16 by autocast, with weights, gradients and moments in f32 (`bf16-master`); or in
bf16 throughout (`bf16-stochastic`, although PyTorch rounds to nearest). A step is forward, loss,
backward, clipping to norm 1.0, AdamW. It uses PyTorch's variants of AdamW and clipping that are
fastest on this machine. Prints one line of JSON.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x))  # (B, T, 3 C)
        split = qkv.view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, C / H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, context, width)
        x = x + self.attention_out(y)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # (B, T), (B, T) -> ()
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


ADAMW_VARIANTS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False},
}


def make_adamw(model: nn.Module, variant: str, lr: float) -> torch.optim.AdamW:
    options = ADAMW_VARIANTS[variant]
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **options
    )


def median_seconds(action, repeats: int = 5) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fastest_adamw(model: nn.Module) -> str:
    """The variant that updates fastest; a learning rate of 0 leaves the weights unchanged."""
    seconds = {}
    for variant in ADAMW_VARIANTS:
        try:
            seconds[variant] = median_seconds(make_adamw(model, variant, lr=0.0).step)
        except RuntimeError:
            continue  # this build of PyTorch does not have it for CPUs
    return min(seconds, key=seconds.get)


def fastest_clipping(model: nn.Module) -> bool:
    """Whether clipping all tensors at once is faster than clipping them one by one."""

    def seconds(foreach: bool) -> float:
        return median_seconds(
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=foreach)
        )

    return seconds(True) < seconds(False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=256)
    precisions = ["f32", "bf16-master", "bf16-stochastic"]
    parser.add_argument("--precision", choices=precisions, default="f32")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Gpt(args)
    if args.precision == "bf16-stochastic":
        model = model.to(torch.bfloat16)
    autocast = args.precision == "bf16-master"
    batches = torch.randint(args.vocab, (4, args.batch, args.context + 1))

    def forward_backward(index: int) -> Tensor:
        batch = batches[index % len(batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        return loss

    forward_backward(0)
    variant = fastest_adamw(model)
    foreach = fastest_clipping(model)
    optimizer = make_adamw(model, variant, lr=3e-4)

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = forward_backward(index)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        return loss.item()

    for index in range(args.warmup):
        step(index)
    seconds = []
    for index in range(args.steps):
        start = time.perf_counter()
        loss = step(index)
        seconds.append(time.perf_counter() - start)

    median = statistics.median(seconds)
    result = {
        "tokens_per_second": args.batch * args.context / median,
        "step_ms": median * 1e3,
        "step_ms_min": min(seconds) * 1e3,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": loss,
        "optimizer": variant,
        "precision": args.precision,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
