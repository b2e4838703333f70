"""Image classifiers against PyTorch: what is saved gives the same logits, and training the same losses."""

import json
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(ROOT / "examples" / "pytorch"))
import image_classifier

SIDE = 16
CLASSES = 7
BATCH = 8
STEPS = 50

# Without dropout: its random bits are our own.
NETWORKS = {
    "small-cnn": {"architecture": "small-cnn", "widths": [8, 16], "hidden": 32, "dropout": 0.0},
    "resnet-9": {"architecture": "resnet9", "widths": [8, 8, 16, 16], "logit_scale": 0.125},
    "resnet": {"architecture": "resnet", "widths": [8, 16], "blocks": 2},
}


def config_of(network: dict) -> dict:
    return {
        "model_type": "storm-image",
        "image_size": [SIDE, SIDE],
        "channels": 3,
        "classes": CLASSES,
        "mean": [0.5, 0.4, 0.6],
        "std": [0.25, 0.2, 0.3],
        "network": network,
    }


def pictures(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a brighter stripe, whose place is the class: uint8 (B, H, W, C), and (B)."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    images = torch.randint(160, (BATCH, SIDE, SIDE, 3), generator=generator)
    for image, target in zip(images, targets, strict=True):
        image[:, 2 * target : 2 * target + 2] += 90
    return images.to(torch.uint8), targets


def job(images: torch.Tensor, targets: torch.Tensor) -> dict:
    return {"images": images.flatten().tolist(), "targets": targets.tolist()}


def run(run_tool, folder, fields: dict) -> dict:
    path = folder / "job.json"
    path.write_text(json.dumps(fields, default=str))
    return json.loads(run_tool("storm-parity", path))


@pytest.mark.parametrize("name", NETWORKS)
def test_fifty_steps_of_sgd_and_saved_logits(name, run_tool, record, tmp_path):
    config = config_of(NETWORKS[name])
    torch.manual_seed(1)
    module = image_classifier.build(config)
    start, trained = tmp_path / "start", tmp_path / "trained"
    start.mkdir()
    (start / "config.json").write_text(json.dumps(config))
    save_file(module.state_dict(), start / "model.safetensors")

    # In f64: rounding to f32 moves a value across the zero of a ReLU now and then, after which losses differ by 1e-3. PyTorch in
    # f32 is that far from itself in f64, so it is no reference for STORM in f32.
    module = module.double()
    # The same few batches over and over, so that there is something to learn.
    batches = [pictures(index % 4) for index in range(STEPS)]
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.005, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    module.train()
    expected = []
    for images, targets in batches:
        logits = module(image_classifier.normalized(images, config).double())
        loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < 0.9 * expected[0]

    found = run(
        run_tool,
        tmp_path,
        {
            "job": "image_train",
            "model": start,
            "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            "label_smoothing": 0.1,
            "learning_rate": 0.005,
            "steps": [job(*batch) for batch in batches],
            "save": trained,
        },
    )
    errors = [abs(a - b) / b for a, b in zip(found["losses"], expected, strict=True)]
    record(f"relative loss of {name} in {STEPS} steps of SGD", max(errors))
    assert max(errors) <= 1e-4

    # What STORM saved, as PyTorch computes with it.
    loaded, loaded_config = image_classifier.load(trained)
    assert loaded_config == config
    images, targets = pictures(99)
    with torch.no_grad():
        wanted = loaded(image_classifier.normalized(images, config))
    output = tmp_path / "logits.safetensors"
    fields = {"job": "image_logits", "model": trained, "batch": job(images, targets)}
    run(run_tool, tmp_path, {**fields, "output": output})
    logits_error = (load_file(output)["logits"] - wanted).abs().max().item()
    record(f"logits of {name}", logits_error)
    assert logits_error <= 1e-4
