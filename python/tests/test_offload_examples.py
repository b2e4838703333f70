"""The examples run, and `python -m storm.selftest` reports if there is no GPU."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pytorch"


@pytest.mark.parametrize("name", ["plain_module.py", "hugging_face.py"])
def test_example(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    output = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "by plan" in output and "offloaded" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_selftest_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["selftest", "--only", "training", "--programs", "5"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("storm.selftest", run_name="__main__")
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert "no GPU here" in output
    assert "1 of 1 checks pass" in output
    assert "5 of 5 random programs pass" in output
