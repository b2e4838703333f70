"""Gradients with `storm.offload` equal plain PyTorch's, bit for bit, in every kind of loop."""

import pytest
import storm
import torch
from storm.selftest.checks import CHECKS
from storm.selftest.compare import SETTINGS, assert_same, gradients, make_block, run_twice
from storm.selftest.models import Mixed, batches


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("name", CHECKS)
def test_same_as_plain(name, setting):
    check = CHECKS[name]
    block = make_block("cpu", seed=setting, **SETTINGS[setting])
    torch.manual_seed(setting)
    run_twice(check.loop, check.make(), block)
    assert check.holds is None or check.holds(block.report()), str(block.report())
    block.close()
    assert block.report().host_bytes == 0


def test_wrapped_module():
    ids = batches("cpu", 5)

    def loop(module):
        torch.manual_seed(0)
        seen = []
        for batch in ids:
            module(batch).backward()
            seen.append(gradients(module))
        return seen

    model = Mixed()
    expected = loop(model)
    wrapped = storm.wrap(model, policy="all", window=0, keep_below=0, device="cpu", chaos_seed=7)
    assert wrapped is model
    assert_same(expected, loop(wrapped))
    assert storm.session(wrapped).report().planned_steps == 3
    with pytest.raises(ValueError, match="already"):
        storm.wrap(wrapped)
