"""Runs `parity_at_length.py` as users call it, with a tiny model and a run of seconds."""

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "python"))
import parity_at_length
import parity_chart

SCRIPT = ROOT / "python" / "parity_at_length.py"
TINY = (
    "--layers 3 --width 64 --heads 4 --kv-heads 2 --mlp-width 160 "
    "--steps 10 --seq 32 --threads 1"
)


@pytest.fixture(scope="module")
def folder(bin_dir, tmp_path_factory):
    """The output folder of a short run."""
    out = tmp_path_factory.mktemp("parity")
    command = [sys.executable, SCRIPT, "--storm", bin_dir / "storm", "--out", out, *TINY.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "largest difference" in done.stdout
    return out


def test_ten_steps_in_a_third_of_the_memory(folder, record):
    result = json.loads((folder / "parity.json").read_text())
    ours, theirs = result["losses"]["storm"], result["losses"]["pytorch"]
    assert len(ours) == len(theirs) == 10
    assert len(set(ours)) == 10
    record("loss in ten steps", result["difference_max"])
    assert result["difference_max"] <= 1e-4
    memory = result["storm"]
    assert memory["device_bytes"] <= memory["budget_bytes"] <= memory["resident_bytes"] / 3
    with (folder / "parity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["storm"]) for row in rows] == ours
    # The picture must be well-formed XML.
    ElementTree.parse(folder / "parity.svg")


def test_other_batches_are_noticed(folder):
    result = json.loads((folder / "parity.json").read_text())
    theirs = result["losses"]["pytorch"]
    shifted = parity_at_length.differences(theirs[1:], theirs[:-1])
    assert max(map(abs, shifted)) > 1e-3


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 500, [100, 200, 300, 400, 500]),
        (1.3, 5.9, [2, 3, 4, 5]),
        (0.0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_axes_are_marked_at_round_numbers(low, high, expected):
    assert parity_chart.ticks(low, high, 5) == expected
