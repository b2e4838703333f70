"""Compares gradients in bf16 and in fp8 with those in f32, layer by layer.

    storm train examples/quickstart.toml
    python python/gradients_by_layer.py --storm-parity target/release/storm-parity --model runs/quickstart/model

STORM computes the gradients of one step three times, from the same weights and the same text. The
model must have been trained on bytes (`tokenizer = "bytes"`). Prints a table with, for each layer,
the norm of the difference divided by the norm of the gradient in f32, and the cosine of the angle
between the two gradients.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ["bf16-stochastic", "fp8"]
CHUNK_ROWS = 2048


def by_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins all gradients of each layer into one vector. A tensor outside of layers keeps its own
    name."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        found = re.search(r"\b(?:layers|h)\.(\d+)\.", name)
        layer = f"layer {found[1]}" if found else name.removesuffix(".weight")
        parts.setdefault(layer, []).append(tensor.double().flatten())
    return {layer: torch.cat(vectors) for layer, vectors in parts.items()}


def difference(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """The norm of the difference divided by the norm of `expected`, and the cosine of their
    angle."""
    error = (actual - expected).norm() / expected.norm()
    cosine = torch.dot(actual, expected) / (actual.norm() * expected.norm())
    return error.item(), cosine.item()


def batches(text: bytes, count: int, rows: int, sequence: int) -> list[dict]:
    """Micro-batches of consecutive rows of the text."""
    taken = iter(range(0, len(text) - sequence, sequence))
    micro_batches = []
    for _ in range(count):
        starts = [next(taken, None) for _ in range(rows)]
        if None in starts:
            raise SystemExit("the text is too short for these batches: give --batch, --seq or --text")
        tokens = [list(text[start : start + sequence]) for start in starts]
        targets = [list(text[start + 1 : start + 1 + sequence]) for start in starts]
        micro_batches.append({"tokens": tokens, "targets": targets})
    return micro_batches


def gradients(tool: Path, model: Path, precision: str, micro_batches: list[dict]) -> dict[str, Tensor]:
    """The gradients of one step."""
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "job.json", Path(folder) / "gradients.safetensors"
        job = {"job": "gradients", "model": str(model), "precision": precision}
        job |= {"chunk_rows": CHUNK_ROWS, "micro_batches": micro_batches, "output": str(output)}
        path.write_text(json.dumps(job))
        done = subprocess.run([tool, path], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{tool}: {done.stderr.strip()}")
        return load_file(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storm-parity", type=Path, required=True, help="the storm-parity binary")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    text = ROOT / "corpus" / "pride-and-prejudice.txt"
    parser.add_argument("--text", type=Path, default=text, help="what the gradients are of")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--seq", type=int, default=128, help="bytes of a row")
    args = parser.parse_args()

    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    if vocabulary != 257:
        raise SystemExit(f"{args.model} has {vocabulary} tokens: a model of bytes has 257")
    micro_batches = batches(args.text.read_bytes(), args.accumulate, args.batch, args.seq)
    found = {
        precision: by_layer(gradients(args.storm_parity, args.model, precision, micro_batches))
        for precision in ["f32", *PRECISIONS]
    }
    expected = found.pop("f32")
    heads = [f"{precision}: difference | cosine" for precision in found]
    print(f"| | {' | '.join(heads)} |\n|{'---|' * (1 + 2 * len(found))}")
    for layer, gradient in expected.items():
        cells = [difference(gradient, other[layer]) for other in found.values()]
        row = " | ".join(f"{100 * error:.2f} % | {cosine:.5f}" for error, cosine in cells)
        print(f"| {layer} | {row} |")


if __name__ == "__main__":
    main()
