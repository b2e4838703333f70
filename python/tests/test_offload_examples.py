"""The examples run, and `python -m storm.selftest` says that there is no GPU where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["plain_module.py", "hugging_face.py"])
def test_example(name):
    output = run(str(ROOT / "examples" / "pytorch" / name))
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "by plan" in output and "offloaded" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_selftest_without_a_gpu():
    output = run("-m", "storm.selftest", "--only", "training")
    assert "no GPU here" in output
    assert "1 of 1 checks pass" in output
