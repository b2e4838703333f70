"""Fixtures that the comparisons share: STORM's binaries, the models and the corpus."""

import itertools
import json
import os
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

# Must be set before transformers is imported: nothing may be downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from models import random_model
from reference import Batch, Gradients
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]

# These models are so small that a second thread costs more than it gains, especially on a busy
# machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    """The folder of STORM's binaries. `cargo xtask test` builds them and sets the variable."""
    folder = os.environ.get("STORM_BIN_DIR")
    if folder is None:
        pytest.exit("STORM_BIN_DIR is not set: run `cargo xtask test`", returncode=2)
    return Path(folder)


@pytest.fixture(scope="session")
def run_tool(bin_dir):
    """Runs one of STORM's binaries and returns what it printed. A failure shows both outputs."""

    def run(name: str, *args: object, timeout_s: float = 600) -> str:
        command = [str(bin_dir / name), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, (
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    return run


@pytest.fixture(scope="session")
def corpus() -> bytes:
    """The text that ships with the repository."""
    return (ROOT / "corpus" / "pride-and-prejudice.txt").read_bytes()


class Storm:
    """Runs STORM for these tests: one `storm-parity` process per job."""

    def __init__(self, run_tool, folder: Path):
        self._run_tool = run_tool
        self._folder = folder
        self._numbers = itertools.count()

    def _run(self, job: str, fields: dict) -> tuple[dict, Path]:
        number = next(self._numbers)
        path, output = self._folder / f"{number}.json", self._folder / f"{number}.safetensors"
        if job in ("logits", "gradients"):
            fields = {**fields, "output": str(output)}
        path.write_text(json.dumps({"job": job, **fields}, default=str))
        return json.loads(self._run_tool("storm-parity", path)), output

    def logits(self, model: Path, batch: Batch, **adapter) -> Tensor:
        """(B, T, V)"""
        _, output = self._run("logits", {"model": model, "batch": batch.job(), **adapter})
        return load_file(output)["logits"]

    def gradients(
        self, model: Path, batches: list[Batch], chunk_rows: int, precision: str = "f32"
    ) -> Gradients:
        """One backward pass."""
        micro_batches = [batch.job() for batch in batches]
        fields = {"precision": precision, "chunk_rows": chunk_rows, "micro_batches": micro_batches}
        numbers, output = self._run("gradients", {"model": model, **fields})
        return Gradients(numbers["loss"], numbers["gradient_norm"], load_file(output))

    def train(self, model: Path, **fields) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of all steps."""
        numbers, _ = self._run("train", {"model": model, "seed": 0, **fields})
        return numbers["losses"], numbers["gradient_norms"]

    def round_trip(self, model: Path, **save) -> None:
        """Opens a model and saves it again."""
        self._run("round_trip", {"model": model, "save": save})


@pytest.fixture(scope="session")
def storm(run_tool, tmp_path_factory) -> Storm:
    """Runs jobs of `storm-parity`."""
    return Storm(run_tool, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(name, tied)`: a model of `models.CONFIGS` and its directory, created once."""

    @cache
    def make(name: str, tied: bool) -> tuple[PreTrainedModel, Path]:
        directory = tmp_path_factory.mktemp(name)
        model = random_model(name, tied)
        model.save_pretrained(directory)
        return model, directory

    return make


_worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))


@pytest.fixture
def record(request):
    """`record(quantity, error)` keeps an error for the table of worst errors at the end of the
    run."""
    callspec = getattr(request.node, "callspec", None)
    model = callspec.params.get("model") if callspec else None
    subject = model[0] if model else request.function.__name__

    def keep(quantity: str, error: float) -> None:
        _worst[subject][quantity] = max(_worst[subject][quantity], error)

    return keep


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints how close the comparisons were to their limits."""
    if _worst:
        terminalreporter.section("worst errors")
    for subject, errors in _worst.items():
        columns = [f"{quantity} {error:.1e}" for quantity, error in errors.items()]
        terminalreporter.write_line(f"{subject:20} {', '.join(columns)}")
