"""Checks that ``storm.offload`` is exact on this machine, and measures its speed on a GPU."""

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from typing import Iterator, List

# Makes matrix products deterministic. Must be set before PyTorch initializes CUDA.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from . import bench
from .checks import CHECKS
from .compare import SETTINGS, make_block, run_twice
from .programs import check_program


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Selects deterministic kernels."""
    # Some settings intentionally allow less than these models need.
    warnings.filterwarnings("ignore", message="storm: a step on")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)


def run_programs(device: str, count: int) -> int:
    """Runs random programs. Returns how many failed."""
    failed = 0
    for seed in range(count):
        try:
            check_program(seed, device)
        except AssertionError:
            failed += 1
            print(f"FAIL random program {seed}")
            traceback.print_exc(file=sys.stdout)
    print(f"{count - failed} of {count} random programs pass", flush=True)
    return failed


def run_checks(device: str, names: List[str]) -> int:
    """Runs checks with every setting. Returns how many failed."""
    failed = 0
    for name in names:
        check = CHECKS[name]
        for seed, settings in enumerate(SETTINGS):
            block = make_block(device, seed, **settings)
            torch.manual_seed(seed)
            try:
                run_twice(check.loop, check.make().to(device), block)
                assert check.holds is None or check.holds(block.report()), str(block.report())
                block.close()
                assert block.report().host_bytes == 0, "host memory is still held"
            except Exception:
                failed += 1
                print(f"FAIL {name}, {settings}")
                traceback.print_exc(file=sys.stdout)
                break
        else:
            print(f"pass {name}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m storm.selftest", description=__doc__)
    parser.add_argument("--no-bench", action="store_true", help="checks only")
    parser.add_argument("--no-checks", action="store_true", help="benchmark only")
    parser.add_argument("--only", choices=list(CHECKS), action="append", help="this check only")
    parser.add_argument("--programs", type=int, default=150, help="random programs to check; default: 150")
    bench.add_arguments(parser)
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    else:
        print(f"PyTorch {torch.__version__}; no GPU here: checks run on the CPU, the benchmark is left out")
    failed = 0
    if not args.no_checks:
        names = args.only or list(CHECKS)
        device = "cuda" if has_gpu else "cpu"
        with repeatable():
            failed = run_checks(device, names)
            print(f"{len(names) - failed} of {len(names)} checks pass: gradients equal PyTorch's to the bit")
            failed += run_programs(device, args.programs)
    if has_gpu and not args.no_bench:
        bench.run(args)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
