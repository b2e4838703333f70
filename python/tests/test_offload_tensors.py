"""Tests what moves, what stays, and that every kind of view returns unchanged."""

import gc
import pickle

import pytest
import storm
import torch
from storm.selftest.compare import assert_same, gradients
from storm.selftest.compare import make_block as make_block_on
from storm.selftest.models import Mixed
from storm.selftest.models import batches as batches_on
from torch import nn


def make_block(**settings):
    return make_block_on("cpu", seed=0, **settings)


def batches(count):
    return batches_on(torch.device("cpu"), count)


class Keep(torch.autograd.Function):
    """Saves tensors, and records them as its backward pass receives them."""

    seen = []

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, gradient):
        Keep.seen.append(ctx.saved_tensors)
        return (gradient, *[None] * len(ctx.saved_tensors))


def save_and_need(block, make):
    """Checks what is returned for the tensors that `make()` creates, in a recorded step and in planned ones."""
    for _ in range(3):
        Keep.seen.clear()
        anchor = torch.zeros((), requires_grad=True)
        with block:
            tensors = make()
            expected = [tensor.clone() for tensor in tensors]
            layouts = [(tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]
            out = Keep.apply(anchor, *tensors)
            del tensors
        out.backward()
        (found,) = Keep.seen
        assert_same(expected, list(found))
        assert [(t.stride(), t.dtype) for t in found] == [(s, d) for s, _, d in layouts]
    Keep.seen.clear()
    return block


def moving_block(**settings):
    return make_block(**{"policy": "all", "window": 0, **settings})


def base():
    return torch.arange(24 * 32 * 8, dtype=torch.float32).reshape(24, 32, 8)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[3:7],
        lambda t: t[:, ::2],
        lambda t: t[..., 5],
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(2, 0, 1)[1:],
        lambda t: t[0, 0].expand(16, 8),
        lambda t: t.as_strided((5, 7), (1, 3), 11),
        lambda t: t.view(torch.int32),
        lambda t: t.view(torch.uint8)[5:9000],
        lambda t: t.to(torch.bfloat16)[2:],
        lambda t: t.to(torch.complex64).imag,
        lambda t: t.bool(),
        lambda t: t[:, :, :0],
        lambda t: t.sum(),
        lambda t: t.to(torch.complex64).conj(),
        lambda t: torch.quantize_per_tensor(t, 0.5, 3, torch.qint8).dequantize(),
        lambda t: t.to_sparse(),
    ],
)
def test_views_come_back(view):
    if view(base()).layout is torch.sparse_coo:
        block = moving_block()
        anchor = torch.zeros((), requires_grad=True)
        with block:
            out = Keep.apply(anchor, view(base()))
        out.backward()
        assert torch.equal(Keep.seen.pop()[0].to_dense(), base())
    else:
        save_and_need(moving_block(), lambda: [view(base())])


def test_one_storage_moves_once():
    def make():
        t = base()
        q, k, v = t.view(24, 32 * 8).view(24, 4, 64).unbind(1)[:3]
        return [t, t[1:], t.t() if t.dim() == 2 else t.transpose(0, 1), q, k, v, t.detach()]

    report = save_and_need(moving_block(), make).report()
    assert report.moved_tensors + report.kept_tensors == 1
    assert report.shared_tensors == 6


def test_a_part_of_a_large_storage_moves_alone():
    data = torch.zeros(1 << 20)

    def make():
        return [data[i * 1000 : i * 1000 + 999] for i in range(4)]

    report = save_and_need(moving_block(), make).report()
    assert report.stored_bytes < 10 * 4 * 4096


def test_what_others_hold_is_not_moved_again():
    held = torch.randn(1000)
    block = moving_block()
    for _ in range(4):
        save_and_need(block, lambda: [held])
    report = block.report()
    assert report.stored_bytes == held.nbytes, "in the recorded step only"
    assert report.fetched_bytes == 0


def test_changed_between_two_saves():
    """Two versions of a tensor are two pieces."""
    block = moving_block()
    for _ in range(3):
        anchor = torch.zeros((), requires_grad=True)
        x = torch.ones(1000)
        with block:
            first = Keep.apply(anchor, x.clone())
            y = x.clone()
            Keep.apply(anchor, y)
            y.add_(1)
            second = Keep.apply(anchor, y)
        Keep.seen.clear()
        (first + second).backward()
        assert sorted(saved[0][0].item() for saved in Keep.seen) == [1.0, 2.0]
    Keep.seen.clear()


def test_parameters_stay():
    model = nn.Linear(64, 64)
    block = moving_block()
    for _ in range(3):
        with block:
            loss = model(torch.randn(8, 64)).square().sum() + (model.weight.t() @ model.weight).sum()
        loss.backward()
    assert block.report().moved_bytes + block.report().kept_bytes < model.weight.nbytes


def test_small_tensors_stay():
    block = moving_block(keep_below="8KiB")
    sizes = (2047, 2048, 2049)
    report = save_and_need(block, lambda: [torch.randn(size) for size in sizes]).report()
    assert report.moved_tensors + report.kept_tensors == 2


MODEL_ERRORS = {
    "output": lambda x: [y := x.exp(), y.add_(1)][0],
    "input": lambda x: [y := x * 1, z := y.square(), y.mul_(2)][1],
    "view": lambda x: [y := x * 1, z := y.view(-1).square(), y[0].mul_(2)][1],
    "base": lambda x: [y := x * 1, z := y[2:].square(), y.mul_(2)][1],
}


@pytest.mark.parametrize("case", MODEL_ERRORS)
@pytest.mark.parametrize("settings", [{"policy": "all", "window": 0}, {"vram": "1GiB"}])
def test_changes_after_saving_are_found(case, settings):
    x = torch.ones(100, 10, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        MODEL_ERRORS[case](x).sum().backward()
    block = make_block(**settings)
    for _ in range(3):
        with block:
            loss = MODEL_ERRORS[case](x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_changed_parameters_are_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    block = moving_block()
    with block:
        loss = model(torch.randn(4, 8)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_freed_graphs_free_their_memory():
    block = make_block(vram="1GiB")
    for _ in range(4):
        with block:
            loss = Mixed()(batches(1)[0])
        del loss
        gc.collect()
    block.close()
    assert block.report().host_bytes == 0
    assert block.report().steps == 4


def test_budget_is_kept():
    """On the CPU the budget is for saved tensors alone: the plan's peak never exceeds it."""
    for vram in (100_000, 200_000, 300_000):
        block = make_block(vram=vram)
        model = Mixed()
        for ids in batches(4):
            with block:
                loss = model(ids)
            loss.backward()
            gradients(model)
        report = block.report()
        assert 0 < report.planned_peak_bytes <= report.allowed_bytes == vram
        assert report.moved_bytes > 0 and report.kept_bytes > 0


def test_a_budget_that_cannot_be_kept_is_said():
    block = make_block(vram=10_000)
    model = Mixed()
    with pytest.warns(UserWarning, match="needs at least"):
        for ids in batches(3):
            with block:
                loss = model(ids)
            loss.backward()


def test_host_memory_is_exact():
    block = moving_block()
    model = Mixed(width=128)
    for ids in batches(3):
        with block:
            loss = model(ids)
        stored = block.report()
        loss.backward()
    assert stored.moved_bytes <= stored.host_bytes <= 1.02 * stored.moved_bytes
    block.close()
    assert block.report().host_bytes == 0


def test_blocks_in_a_loop_are_one_block():
    model = Mixed()
    for ids in batches(4):
        with storm.offload("1GiB", keep_below=0, device="cpu") as block:
            loss = model(ids)
        loss.backward()
    assert block.report().steps == 4
    other = storm.offload("1GiB", keep_below=0, device="cpu")
    assert other is not block


def test_wrapped_models_can_be_copied_and_saved():
    model = storm.wrap(Mixed(), vram="1GiB", keep_below=0, device="cpu")
    ids = batches(1)[0]
    model(ids).backward()
    copied = pickle.loads(pickle.dumps(model))
    copied(ids).backward()
    assert storm.session(copied) is not storm.session(model)
    assert storm.session(copied).report().steps == 1
    assert "storm" not in " ".join(model.state_dict())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vram": "24 potatoes"}, "vram='24 potatoes'"),
        ({"vram": -1}, "vram=-1"),
        ({"vram": float("nan")}, "vram=nan"),
        ({"vram": float("inf")}, "vram=inf"),
        ({"vram": True}, "vram=True"),
        ({"vram": 24}, 'vram=24 .*did you mean vram="24GB"'),
        ({"vram": 7.5}, 'did you mean vram="7.5GB"'),
        ({"vram": "24"}, "vram='24' .*did you mean vram=\"24GB\""),
        ({"ram": 64}, 'did you mean ram="64GB"'),
        ({"policy": "some"}, "policy='some'"),
        ({"policy": "all", "vram": "1GiB"}, "give one of the two"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"window": "many"}, "window='many'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        storm.offload(**settings)


@pytest.mark.parametrize("vram", [24_000_000_000, 24e9, "24000000000", "24GB"])
def test_bytes_may_be_written_in_any_way(vram):
    assert storm.offload(vram=vram)._vram_bytes == 24_000_000_000


def test_reports_need_something_to_report():
    with pytest.raises(RuntimeError, match="nothing was saved"):
        storm.offload(vram="1GiB").report()


def test_report_says_what_happened():
    block = make_block(policy="all", window=0)
    model = Mixed()
    for ids in batches(3):
        with block:
            loss = model(ids)
        loss.backward()
    report = block.report()
    assert report.stored_bytes >= 2 * report.moved_bytes > 0
    assert 0 <= report.hidden_share <= 1
    text = str(report)
    for word in ("recorded", "hidden", "stalls", "kept", "offloaded", "deduplicated", "host", "plan"):
        assert word in text
    assert report.as_dict()["steps"] == 3
