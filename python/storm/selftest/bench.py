"""Speed and memory of training a transformer, compared with other offload methods, in one run.

A Qwen2 model of the ``transformers`` library with random weights, bf16, fused AdamW. Memory is
``torch.cuda.max_memory_allocated``. Neither speed nor memory includes the warm-up steps.
"""

import argparse
import contextlib
import gc
import statistics
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import torch

from .._offload import Offload


class Row(NamedTuple):
    """One way to train."""

    batch: int
    checkpointing: bool
    label: str
    make: Callable[[], ContextManager]


def save_on_cpu() -> ContextManager:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def torchtune_offload() -> ContextManager:
    from torchtune.training import OffloadActivations

    return OffloadActivations(use_streams=True)


def has_torchtune() -> bool:
    try:
        import torchtune.training  # noqa: F401
    except ImportError:
        return False
    return True


def rows() -> List[Row]:
    peers: List[Tuple[str, Callable[[], ContextManager]]] = [("save_on_cpu", save_on_cpu)]
    if has_torchtune():
        peers.append(("torchtune OffloadActivations", torchtune_offload))
    found = [
        Row(4, False, "resident", contextlib.nullcontext),
        Row(4, False, 'storm policy="all"', lambda: Offload(policy="all")),
        *(Row(4, False, label, make) for label, make in peers),
        Row(16, True, "checkpointing", contextlib.nullcontext),
        Row(16, True, 'checkpointing + storm vram="37.2GiB"', lambda: Offload("37.2GiB")),
        *(Row(16, True, f"checkpointing + {label}", make) for label, make in peers),
        Row(16, False, "resident", contextlib.nullcontext),
        Row(16, False, 'storm vram="72GiB"', lambda: Offload("72GiB")),
    ]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="only rows whose number is in this list, as 1,2,5")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each row")
    parser.add_argument("--warmup", type=int, default=4, help="steps before these")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model")


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=args.layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).train()


def measure(args: argparse.Namespace, row: Row) -> Dict[str, Any]:
    torch.manual_seed(0)
    model = make_model(args)
    if row.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(151936, (row.batch, args.length), device="cuda")
    block = row.make()

    def step() -> torch.Tensor:
        with block:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for _ in range(args.warmup):
        loss = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = block.report() if isinstance(block, Offload) else None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    seconds = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) / 1e3
    after = block.report() if isinstance(block, Offload) else None
    return {
        "tokens_per_second": row.batch * args.length / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss.item(),
        "before": before,
        "after": after,
    }


def describe(args: argparse.Namespace, result: Dict[str, Any]) -> Optional[str]:
    before, after = result["before"], result["after"]
    if after is None:
        return None
    steps = args.steps
    copied = after.copy_seconds - before.copy_seconds
    stalled = after.stall_seconds - before.stall_seconds
    return (
        f"    out {(after.stored_bytes - before.stored_bytes) / steps / 1e9:.2f} GB/step, "
        f"back {(after.fetched_bytes - before.fetched_bytes) / steps / 1e9:.2f}, copies {copied / steps:.3f} s, "
        f"stalls {stalled / steps:.3f} s, kept {after.kept_bytes / 2**30:.2f} GiB, "
        f"shared {after.shared_bytes / 2**30:.2f} GiB, host {after.host_bytes / 2**30:.2f} GiB, "
        f"planned peak {after.planned_peak_bytes / 2**30:.2f} of {after.allowed_bytes / 2**30:.2f} GiB, "
        f"by plan {after.planned_steps}/{after.steps}"
    )


def give_back_memory() -> None:
    """Frees what the previous row left, so it does not affect the next. PyTorch also caches
    page-locked memory."""
    gc.collect()
    torch.cuda.empty_cache()
    empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None:
        empty_host_cache()


def run(args: argparse.Namespace) -> None:
    wanted = None if args.rows is None else {int(number) for number in args.rows.split(",")}
    print(f"Qwen2 1.5B shape, {args.layers} layers, {args.length} tokens, bf16, fused AdamW")
    print(f"{'':3} {'batch':>5}  {'':40} {'tokens/s':>9}  {'peak GiB':>8}  loss")
    for number, row in enumerate(rows(), start=1):
        if wanted is not None and number not in wanted:
            continue
        try:
            result = measure(args, row)
        except torch.cuda.OutOfMemoryError:
            print(f"{number:3} {row.batch:5}  {row.label:40} does not fit here", flush=True)
            continue
        finally:
            give_back_memory()
        print(
            f"{number:3} {row.batch:5}  {row.label:40} {result['tokens_per_second']:9.0f}  "
            f"{result['peak_gib']:8.2f}  {result['loss']:.6f}"
        )
        details = describe(args, result)
        if details:
            print(details, flush=True)
