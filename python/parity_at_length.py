"""Compares a long training run of STORM, in a third of its resident memory, with plain PyTorch.

    python python/parity_at_length.py --storm target/release/storm --device cpu

Both start from the same weights, which PyTorch creates, and train on the same batches in the same
order, which STORM writes (`storm data batches`). Both train in f32 with AdamW, weight decay on
matrices, clipping, and a cosine schedule with a warm-up. STORM first runs one step with everything
resident. A third of the memory of that step is the budget of the run.

Writes `parity.json` (both curves and the figures), `parity.csv` and `parity.svg` into the folder
--out. Exit code 1 if any step's loss differs by more than one percent.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Must be set before transformers is imported: nothing may be downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import parity_chart
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
IGNORED = -100
# The byte tokenizer has 256 bytes and an end of text.
VOCABULARY = 257
BETAS = (0.9, 0.95)
EPSILON = 1e-8
DIFFERENCE_MAX = 0.01
SMOOTHING_STEPS = 20

# Sequences per step. A GPU process uses half a gigabyte before it allocates the first tensor. With
# fewer sequences, the budget would be too small for that.
BATCH = {"cpu": 2, "cuda": 32}
SEQUENCE = {"cpu": 128, "cuda": 256}

# Options that leave the planner no way to save memory.
RESIDENT = [
    *("--activations", "keep", "--layer-inputs", "resident", "--weights", "resident"),
    *("--gradients", "resident", "--optimizer-state", "resident", "--update", "end-of-step"),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storm", type=Path, required=True, help="the storm binary")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of both sides")
    parser.add_argument("--out", type=Path, default=Path("runs/parity"), help="folder of results")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, help="sequences per step: 2 on the CPU, 32 on a GPU")
    parser.add_argument("--seq", type=int, help="tokens per sequence: 128 on the CPU, 256 on a GPU")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--mlp-width", type=int, default=1408)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on the CPU")
    parser.add_argument("--memory-share", type=float, default=1 / 3, help="of what STORM needs")
    args = parser.parse_args()
    args.batch = args.batch or BATCH[args.device]
    args.seq = args.seq or SEQUENCE[args.device]
    args.warmup = min(args.warmup, args.steps)
    # Relative to the caller's working directory, not to that of the commands.
    args.storm, args.out = args.storm.resolve(), args.out.resolve()
    return args


def storm_command(args: argparse.Namespace, *words: object) -> list[str]:
    return [str(args.storm), *map(str, words)]


def storm(args: argparse.Namespace, *words: object) -> None:
    """Runs a STORM command and shows its output only if it fails."""
    done = subprocess.run(storm_command(args, *words), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"storm {words[0]} {words[1]} failed:\n{done.stdout}{done.stderr}")


def make_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """A model with fresh weights from PyTorch."""
    torch.manual_seed(args.seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=args.mlp_width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.width // args.heads,
        max_position_embeddings=args.seq,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


class StormSteps:
    """What `storm train` reports about its steps."""

    def __init__(self, records: list[dict], seconds: float):
        self.losses = [record["loss"] for record in records]
        self.learning_rates = [record["learning_rate"] for record in records]
        self.device_bytes = max(record["device_bytes"] for record in records)
        self.host_bytes = max(record["host_bytes"] for record in records)
        self.seconds = seconds


def train_storm(args: argparse.Namespace, work: Path, name: str, *more: object) -> StormSteps:
    """Runs `storm train` from the weights in `work`. `more` are further options."""
    options = {
        "--name": name,
        "--runs": work / "runs",
        "--model": work / "model",
        "--data": work / "data",
        "--seq": args.seq,
        "--batch": args.batch,
        "--seed": args.seed,
        "--precision": "f32",
        "--learning-rate": args.learning_rate,
        "--schedule": "cosine",
        "--weight-decay": args.weight_decay,
        "--decay-targets": "matrices",
        "--beta1": BETAS[0],
        "--beta2": BETAS[1],
        "--epsilon": EPSILON,
        "--clip": args.clip,
        "--device": args.device,
        "--threads": args.threads,
    }
    words = [word for option in options.items() for word in option]
    begun = time.monotonic()
    command = storm_command(args, "train", "--json", *words, *more)
    records = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            record = json.loads(line)
            if record["event"] == "step":
                records.append(record)
                show("STORM", len(records), record["loss"], begun)
    if process.returncode != 0:
        sys.exit(f"storm train ended with exit code {process.returncode}")
    return StormSteps(records, time.monotonic() - begun)


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Warm-up, then cosine decay to a tenth at the last step."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    falling = max(args.steps - args.warmup - 1, 1)
    wave = 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / falling))
    return args.learning_rate * (0.1 + 0.9 * wave)


def train_torch(args: argparse.Namespace, model, tokens: Tensor, targets: Tensor) -> list[float]:
    """Trains in PyTorch. Returns the loss of every step. Tokens and targets are (steps, B, T)."""
    model.to(args.device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=BETAS, eps=EPSILON)
    losses = []
    begun = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        ids = tokens[step].to(args.device, torch.long)  # (B, T)
        wanted = targets[step].to(args.device, torch.long)  # (B, T)
        logits = model(input_ids=ids, use_cache=False).logits  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.item())
        show("PyTorch", step + 1, losses[-1], begun)
    return losses


def show(side: str, step: int, loss: float, begun: float) -> None:
    if step == 1 or step % 25 == 0:
        elapsed = time.monotonic() - begun
        print(f"{side:8} step {step:4}  loss {loss:.4f}  {elapsed:6.1f} s", file=sys.stderr)


def resident_bytes(field: str) -> int:
    """Memory of this process: `VmRSS` is current, `VmHWM` the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"the system does not say {field}")


def torch_memory_bytes(args: argparse.Namespace, before_bytes: int) -> int:
    """The peak memory of weights, gradients, state and activations: on a GPU what PyTorch
    allocated, without the context; on the CPU the growth of the process since `before_bytes`."""
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resident_bytes("VmHWM") - before_bytes


def smooth(values: list[float]) -> list[float]:
    """The moving average over each value and those before it, `SMOOTHING_STEPS` at most."""
    return [
        statistics.fmean(values[max(0, end - SMOOTHING_STEPS) : end])
        for end in range(1, len(values) + 1)
    ]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b - 1 for a, b in zip(ours, theirs, strict=True)]


def compare(args: argparse.Namespace, work: Path) -> dict:
    """Runs both sides and returns all figures."""
    corpus = ROOT / "corpus" / "pride-and-prejudice.txt"
    storm(args, "data", "pack", corpus, "--tokenizer", "bytes", "--out", work / "data")
    batches_file = work / "batches.safetensors"
    order = ["--seq", args.seq, "--batch", args.batch, "--seed", args.seed, "--count", args.steps]
    storm(args, "data", "batches", work / "data", *order, "--out", batches_file)
    batches = load_file(batches_file)

    before_bytes = resident_bytes("VmRSS")
    model = make_model(args)
    model.save_pretrained(work / "model")

    print("STORM with everything resident, one step", file=sys.stderr)
    resident = train_storm(args, work, "resident", "--steps", 1, "--warmup", 0, *RESIDENT)
    budget_bytes = int(resident.device_bytes * args.memory_share)
    print(f"STORM within {mebibytes(budget_bytes)}", file=sys.stderr)
    steps = ["--steps", args.steps, "--warmup", args.warmup]
    ours = train_storm(args, work, "budget", *steps, "--vram", f"{budget_bytes}B")
    # The first loss precedes any update, so no plan may change a bit of it.
    if ours.losses[0] != resident.losses[0]:
        sys.exit(f"the budget changed the first loss: {ours.losses[0]}, not {resident.losses[0]}")
    for step, rate in enumerate(ours.learning_rates):
        if not math.isclose(rate, learning_rate(args, step), rel_tol=1e-6):
            sys.exit(f"step {step + 1}: STORM's learning rate is {rate}")

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("highest")
    begun = time.monotonic()
    theirs = train_torch(args, model, batches["tokens"], batches["targets"])
    torch_seconds = time.monotonic() - begun

    raw = differences(ours.losses, theirs)
    smoothed = differences(smooth(ours.losses), smooth(theirs))
    return {
        "device": args.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "batch": args.batch,
        "sequence": args.seq,
        "storm": {
            "resident_bytes": resident.device_bytes,
            "budget_bytes": budget_bytes,
            "device_bytes": ours.device_bytes,
            "host_bytes": ours.host_bytes,
            "seconds": ours.seconds,
        },
        "pytorch": {
            "memory_bytes": torch_memory_bytes(args, before_bytes),
            "seconds": torch_seconds,
        },
        "difference_max": max(map(abs, raw)),
        "smoothed_difference_max": max(map(abs, smoothed)),
        "smoothing_steps": SMOOTHING_STEPS,
        "losses": {"storm": ours.losses, "pytorch": theirs},
    }


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def write_results(folder: Path, result: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.json").write_text(json.dumps(result, indent=1) + "\n")
    losses = result["losses"]
    with (folder / "parity.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "storm", "pytorch", "difference"])
        raw = differences(losses["storm"], losses["pytorch"])
        table.writerows(zip(range(1, len(raw) + 1), losses["storm"], losses["pytorch"], raw))
    (folder / "parity.svg").write_text(parity_chart.draw(result, DIFFERENCE_MAX))


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="storm-parity-") as work:
        result = compare(args, Path(work))
    write_results(args.out, result)
    ours, theirs = result["storm"], result["pytorch"]
    last = {side: losses[-1] for side, losses in result["losses"].items()}
    raw, smoothed = (
        parity_chart.percent(100 * result[key])
        for key in ("difference_max", "smoothed_difference_max")
    )
    print(
        f"{result['parameters'] / 1e6:.1f}M parameters, {args.steps} steps of "
        f"{args.batch} × {args.seq} tokens, f32, {args.device}\n"
        f"STORM    {mebibytes(ours['device_bytes'])} of device memory (resident it takes "
        f"{mebibytes(ours['resident_bytes'])}), {mebibytes(ours['host_bytes'])} of host memory, "
        f"{ours['seconds']:.0f} s, last loss {last['storm']:.4f}\n"
        f"PyTorch  {mebibytes(theirs['memory_bytes'])}, {theirs['seconds']:.0f} s, "
        f"last loss {last['pytorch']:.4f}\n"
        f"largest difference of a step's loss {raw}, "
        f"of the mean of {SMOOTHING_STEPS} steps {smoothed}\n"
        f"results: {args.out}"
    )
    if result["difference_max"] > DIFFERENCE_MAX:
        print(f"the curves differ by more than {100 * DIFFERENCE_MAX:.0f} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
