"""What the comparisons share: the binaries under test, the corpus, and how much to run."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    """The folder with STORM's release binaries; `cargo xtask test` builds them and names it."""
    folder = os.environ.get("STORM_BIN_DIR")
    if folder is None:
        pytest.exit("STORM_BIN_DIR is not set: run `cargo xtask test`", returncode=2)
    return Path(folder)


@pytest.fixture(scope="session")
def run_tool(bin_dir):
    """Runs a release binary and returns what it printed; a failure shows both outputs."""

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


@pytest.fixture(scope="session")
def long() -> bool:
    """Whether to run the long variants (`cargo xtask test --long`)."""
    return os.environ.get("STORM_TEST_LONG") == "1"
