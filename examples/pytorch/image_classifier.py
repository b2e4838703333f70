"""An image classifier that STORM trained, as a PyTorch module.

    from image_classifier import load
    model, config = load("runs/cifar/model")  # a folder with config.json and model.safetensors
    logits = model(normalized(images, config))  # uint8 (B, H, W, C)
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class SmallCnn(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        network, inputs = config["network"], config["channels"]
        self.depth = len(network["widths"])
        for index, width in enumerate(network["widths"], 1):
            setattr(self, f"conv{index}", nn.Conv2d(inputs, width, 3, padding=1))
            inputs = width
        height, width = (side >> self.depth for side in config["image_size"])
        self.fc1 = nn.Linear(inputs * height * width, network["hidden"])
        self.dropout = nn.Dropout(network["dropout"])
        self.fc2 = nn.Linear(network["hidden"], config["classes"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(1, self.depth + 1):
            x = nn.functional.max_pool2d(getattr(self, f"conv{index}")(x).relu(), 2)
        return self.fc2(self.dropout(self.fc1(x.flatten(1)).relu()))


class ConvNorm(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class PooledLayer(ConvNorm):
    def __init__(self, inputs: int, outputs: int, has_residual: bool):
        super().__init__(inputs, outputs)
        if has_residual:
            self.residual = nn.Sequential(ConvNorm(outputs, outputs), ConvNorm(outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(super().forward(x), 2)
        return x + self.residual(x) if hasattr(self, "residual") else x


class Resnet9(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        network, (a, b, c, d) = config["network"], config["network"]["widths"]
        self.logit_scale = network["logit_scale"]
        self.prep = ConvNorm(config["channels"], a)
        self.layer1 = PooledLayer(a, b, True)
        self.layer2 = PooledLayer(b, c, False)
        self.layer3 = PooledLayer(c, d, True)
        self.fc = nn.Linear(d, config["classes"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.prep(x))))
        return self.fc(x.amax((2, 3)) * self.logit_scale)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


class Resnet(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        widths, blocks = config["network"]["widths"], config["network"]["blocks"]
        self.conv1 = nn.Conv2d(config["channels"], widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages, inputs = len(widths), widths[0]
        for index, width in enumerate(widths, 1):
            first = BasicBlock(inputs, width, 1 if index == 1 else 2)
            others = [BasicBlock(width, width, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{index}", nn.Sequential(first, *others))
            inputs = width
        self.fc = nn.Linear(inputs, config["classes"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        for index in range(1, self.stages + 1):
            x = getattr(self, f"layer{index}")(x)
        return self.fc(x.mean((2, 3)))


NETWORKS = {"small-cnn": SmallCnn, "resnet9": Resnet9, "resnet": Resnet}


def build(config: dict) -> nn.Module:
    """The network of a config.json, with fresh weights."""
    return NETWORKS[config["network"]["architecture"]](config)


def load(folder: str | Path) -> tuple[nn.Module, dict]:
    """The network in a folder with its weights, ready to classify; and its config."""
    config = json.loads((Path(folder) / "config.json").read_text())
    model = build(config)
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval(), config


def normalized(images: Tensor, config: dict) -> Tensor:
    """uint8 (B, H, W, C) as the network reads it: f32 (B, C, H, W)."""
    mean, std = torch.tensor(config["mean"]), torch.tensor(config["std"])
    return ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
