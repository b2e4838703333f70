"""Trains in PyTorch with the same steps as a `train` job of storm-parity."""

import math
from dataclasses import asdict, dataclass

import reference
import torch
from reference import Batch
from transformers import PreTrainedModel


@dataclass
class AdamW:
    """Settings in storm-parity's format. Biases and norms have no weight decay unless `decay` is
    `"all"`."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decay: str = "matrices"
    max_norm: float | None = None


@dataclass
class Step:
    """One optimizer step."""

    learning_rate: float
    micro_batches: list[Batch]


def warmup_cosine(step: int, steps: int, peak: float) -> float:
    """Warm-up over a tenth of the steps, then decay to a tenth of the peak."""
    warmup = steps // 10
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def job(steps: list[Step], settings: AdamW) -> dict:
    """The part of a `train` job that PyTorch also receives."""
    return {
        "optimizer": asdict(settings),
        "steps": [
            {
                "learning_rate": step.learning_rate,
                "micro_batches": [batch.job() for batch in step.micro_batches],
            }
            for step in steps
        ],
    }


def train(
    model: PreTrainedModel, steps: list[Step], settings: AdamW
) -> tuple[list[float], list[float]]:
    """Trains in place; returns losses and gradient norms of all steps."""
    decays = [p for p in model.parameters() if settings.decay == "all" or p.dim() >= 2]
    spared = [p for p in model.parameters() if settings.decay != "all" and p.dim() < 2]
    groups = [
        {"params": decays, "weight_decay": settings.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], 0.0, betas, settings.epsilon)
    losses, norms = [], []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step.learning_rate
        optimizer.zero_grad()
        loss = reference.loss(model, step.micro_batches)
        loss.backward()
        max_norm = math.inf if settings.max_norm is None else settings.max_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
