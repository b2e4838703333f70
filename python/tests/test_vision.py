"""Compares image classifiers with PyTorch: gradients, losses, and logits of saved models."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(ROOT / "examples" / "pytorch"))
import image_classifier

CLASSES = 7
BATCH = 8
STEPS = 50
SMOOTHING = 0.1

# Without dropout, because its random bits are STORM's own.
NETWORKS = {
    "small-cnn": {"architecture": "small-cnn", "widths": [8, 16], "hidden": 32, "dropout": 0.0},
    "resnet-9": {"architecture": "resnet9", "widths": [8, 8, 16, 16], "logit_scale": 0.125},
    "resnet": {"architecture": "resnet", "widths": [8, 16], "blocks": 2},
}
SIDES = dict.fromkeys(NETWORKS, 16)

if os.environ.get("STORM_LONG_TESTS") == "1":
    # The presets, at their full width and size.
    full = {"architecture": "small-cnn", "widths": [32, 64, 128], "hidden": 256, "dropout": 0.0}
    NETWORKS["small-cnn, full"] = full
    NETWORKS["resnet-18, full"] = {
        "architecture": "resnet",
        "widths": [64, 128, 256, 512],
        "blocks": 2,
    }
    NETWORKS["resnet-18, narrow"] = {
        "architecture": "resnet",
        "widths": [8, 16, 32, 64],
        "blocks": 2,
    }
    SIDES |= {"small-cnn, full": 32, "resnet-18, full": 32, "resnet-18, narrow": 32}

# ResNet-18 has millions of ReLUs, and f32 and f64 disagree on the sign of some whose input is
# nearly zero. With fresh weights, a single one of these in the third stage changes the gradients of
# all layers below it by 1 %, and PyTorch in f32 is 2e-3 from PyTorch in f64 after fifty steps. So
# its norms start with a bias that keeps almost every input away from zero. This makes activations
# large, and larger with the width; the learning rates are chosen for that.
DEEP = ("resnet-18, full", "resnet-18, narrow")
RATES = {"resnet-18, full": 0.00005, "resnet-18, narrow": 0.0005}
BIAS = 4.0

# The limits of the errors of losses over fifty steps, of logits, and of the gradients of each layer
# in one step. STORM's bits are the same on every machine. No ReLU of the narrow networks switches,
# but one of the full CNN does.
LOSSES_RELATIVE = 1e-6
LOSSES_RELATIVE_FULL = 1e-4
LOGITS_ABSOLUTE = 1e-4
GRADIENTS_RELATIVE = 3e-6


def config_of(network: dict, side: int) -> dict:
    return {
        "model_type": "storm-image",
        "image_size": [side, side],
        "channels": 3,
        "classes": CLASSES,
        "mean": [0.5, 0.4, 0.6],
        "std": [0.25, 0.2, 0.3],
        "network": network,
    }


def pictures(seed: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a brighter stripe whose position is the class: uint8 (B, H, W, C), and (B)."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    images = torch.randint(160, (BATCH, side, side, 3), generator=generator)
    for image, target in zip(images, targets, strict=True):
        image[:, 2 * target : 2 * target + 2] += 90
    return images.to(torch.uint8), targets


def job(images: torch.Tensor, targets: torch.Tensor) -> dict:
    return {"images": images.flatten().tolist(), "targets": targets.tolist()}


def run(run_tool, folder, fields: dict) -> dict:
    path = folder / "job.json"
    path.write_text(json.dumps(fields, default=str))
    return json.loads(run_tool("storm-parity", path))


def normalized(images: torch.Tensor, config: dict, dtype: torch.dtype) -> torch.Tensor:
    """The input of the network: in f64 without rounding, in f32 rounded as in STORM, by one product
    and one sum."""
    mean, std = (torch.tensor(config[name]).double() for name in ("mean", "std"))
    factor, summand = (1 / (255 * std)).to(dtype), (-mean / std).to(dtype)
    return (images.to(dtype) * factor + summand).permute(0, 3, 1, 2).contiguous()


def loss_of(
    module: torch.nn.Module, config: dict, batch: tuple, dtype: torch.dtype
) -> torch.Tensor:
    images, targets = batch
    logits = module(normalized(images, config, dtype))
    return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=SMOOTHING)


def losses_of_pytorch(
    module: torch.nn.Module, config: dict, batches: list, rate: float, dtype: torch.dtype
) -> list[float]:
    """Trains a copy of a module. Returns the loss of every step."""
    module = copy.deepcopy(module).to(dtype)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    module.train()
    losses = []
    for batch in batches:
        loss = loss_of(module, config, batch, dtype)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def largest_error(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


def fresh(name: str, folder: Path) -> tuple[torch.nn.Module, dict]:
    """A network with fresh weights and its config, both also saved in the folder."""
    config = config_of(NETWORKS[name], SIDES[name])
    torch.manual_seed(1)
    module = image_classifier.build(config)
    if name in DEEP:
        for layer in module.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                torch.nn.init.constant_(layer.bias, BIAS)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(module.state_dict(), folder / "model.safetensors")
    return module, config


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in DEEP])
def test_gradients_of_every_layer(name, run_tool, record, tmp_path):
    start, output = tmp_path / "start", tmp_path / "gradients.safetensors"
    module, config = fresh(name, start)
    batch = pictures(0, SIDES[name])
    exact = copy.deepcopy(module).double().train()
    expected = loss_of(exact, config, batch, torch.float64)
    expected.backward()
    fields = {"job": "image_gradients", "model": start, "label_smoothing": SMOOTHING}
    found = run(run_tool, tmp_path, {**fields, "batch": job(*batch), "output": output})
    assert abs(found["loss"] / expected.item() - 1) <= 1e-6
    gradients = load_file(output)
    parameters = dict(exact.named_parameters())
    assert gradients.keys() == parameters.keys()
    for parameter, values in parameters.items():
        error = (gradients[parameter] - values.grad).norm() / values.grad.norm()
        record(f"relative gradient of {name}", error.item())
        assert error <= GRADIENTS_RELATIVE, parameter


@pytest.mark.parametrize("name", NETWORKS)
def test_fifty_steps_of_sgd_and_saved_logits(name, run_tool, record, tmp_path):
    start, trained = tmp_path / "start", tmp_path / "trained"
    module, config = fresh(name, start)
    # The same few batches repeat, so that there is something to learn.
    batches = [pictures(index % 4, SIDES[name]) for index in range(STEPS)]
    # In f64, because a ReLU that switches takes PyTorch in f32 as far as 2e-3 away. So PyTorch in
    # f32 is not a reference for STORM in f32.
    rate = RATES.get(name, 0.005)
    expected = losses_of_pytorch(module, config, batches, rate, torch.float64)
    assert expected[-1] < 0.9 * expected[0]
    in_f32 = losses_of_pytorch(module, config, batches, rate, torch.float32)
    of_pytorch = largest_error(in_f32, expected)

    found = run(
        run_tool,
        tmp_path,
        {
            "job": "image_train",
            "model": start,
            "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            "label_smoothing": SMOOTHING,
            "learning_rate": rate,
            "steps": [job(*batch) for batch in batches],
            "save": trained,
        },
    )
    error = largest_error(found["losses"], expected)
    record(f"relative loss of {name} in {STEPS} steps of SGD", error)
    record(f"the same of PyTorch in f32 ({name})", of_pytorch)
    bound = LOSSES_RELATIVE_FULL if "full" in name else LOSSES_RELATIVE
    assert error <= bound

    # PyTorch's logits of the model that STORM saved.
    loaded, loaded_config = image_classifier.load(trained)
    assert loaded_config == config
    images, targets = pictures(99, SIDES[name])
    with torch.no_grad():
        wanted = loaded(image_classifier.normalized(images, config))
    output = tmp_path / "logits.safetensors"
    fields = {"job": "image_logits", "model": trained, "batch": job(images, targets)}
    run(run_tool, tmp_path, {**fields, "output": output})
    logits_error = (load_file(output)["logits"] - wanted).abs().max().item()
    record(f"logits of {name}", logits_error)
    assert logits_error <= LOGITS_ABSOLUTE
