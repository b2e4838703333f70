"""Long loops, whole models and several processes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from models import random_model
from storm.selftest.compare import SETTINGS, assert_same, gradients, make_block, run_twice
from storm.selftest.models import Mixed, batches
from torch import nn

HERE = Path(__file__).resolve().parent


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("settings", SETTINGS[1:3])
def test_memory_is_flat(settings):
    """A thousand steps, each saving 0.4 MB: a leak of a hundredth of that would be detected."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
    block = make_block("cpu", seed=0, **settings)

    def steps(count):
        for _ in range(count):
            with block:
                loss = model(torch.randn(128, 64)).square().mean()
            loss.backward()
            model.zero_grad()

    steps(100)
    before = resident_kib()
    steps(1000)
    assert resident_kib() - before < 4000
    assert block.report().planned_steps >= 1000


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hugging_face_models(name, checkpointing):
    model = random_model(name, True).float().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))

    def loop(model, block):
        seen = []
        for _ in range(4):
            with block:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            seen.append((loss.detach(), gradients(model)))
        return seen

    block = make_block("cpu", seed=0, policy="all", window=0)
    run_twice(loop, model, block)
    assert block.report().planned_steps == 2
    assert block.report().moved_tensors > 0


def test_threads_with_one_block_each():
    """Hooks apply to their thread only, and engines share nothing."""
    model = Mixed(layers=1).eval()
    ids = batches("cpu", 4)
    expected = []
    for batch in ids:
        model(batch).backward()
        expected.append(gradients(model))
    found = [None] * len(ids)

    def work(index):
        own = Mixed(layers=1).eval()
        own.load_state_dict(model.state_dict())
        block = make_block("cpu", seed=index, policy="all", window=0)
        for _ in range(5):
            own.zero_grad()
            with block:
                loss = own(ids[index])
            loss.backward()
        found[index] = gradients(own)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ids))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert_same(expected, found)


def test_threads_that_share_a_block():
    block = make_block("cpu", seed=0, policy="all", window=0)
    model = Mixed(layers=1).eval()
    ids = batches("cpu", 4)
    expected = [torch.autograd.grad(model(batch), list(model.parameters())) for batch in ids]
    found = [None] * len(ids)

    def work(index):
        for _ in range(5):
            with storm_hooks(block):
                loss = model(ids[index])
            found[index] = torch.autograd.grad(loss, list(model.parameters()))

    def storm_hooks(block):
        return torch.autograd.graph.saved_tensors_hooks(block._pack, block._unpack)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ids))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert_same(expected, found)


def test_data_parallel():
    """Two processes under torchrun: gradients are averaged as without STORM, bit for bit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "offload_processes.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same in rank") == 2
