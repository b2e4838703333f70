"""Reference results from PyTorch, and the limits of STORM's differences from them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

IGNORED = -100

# The project's error limits, f32 against f32.
LOGITS_ABSOLUTE = 1e-4
LOSS_ABSOLUTE = 1e-5
GRADIENT_RELATIVE = 1e-4

# A gradient whose norm is below this share of the global norm is zero except for rounding. The
# gradients of queries and keys are, if every token attends only to itself.
GRADIENT_ZERO = 1e-6
QUERY_AND_KEY = ("q_proj", "k_proj", "q_norm", "k_norm")


@dataclass
class Batch:
    """A micro-batch; every field is (B, T)."""

    tokens: Tensor
    targets: Tensor
    segments: Tensor | None = None
    # Only for transformers: STORM needs none for padding on the right.
    attention_mask: Tensor | None = None

    def job(self) -> dict:
        """The batch in storm-parity's format."""
        columns = {"tokens": self.tokens, "targets": self.targets, "segments": self.segments}
        return {name: column.tolist() for name, column in columns.items() if column is not None}

    def samples(self) -> list["Batch"]:
        """Each packed sample as a separate batch. Without segments, the batch itself."""
        if self.segments is None:
            return [self]
        samples = []
        for row, segments in enumerate(self.segments):
            starts = [i for i in range(len(segments)) if i == 0 or segments[i] != segments[i - 1]]
            for start, end in zip(starts, [*starts[1:], len(segments)]):
                cut = (slice(row, row + 1), slice(start, end))
                samples.append(Batch(self.tokens[cut], self.targets[cut]))
        return samples


def random_batch(batch: int, sequence: int, vocabulary: int, seed: int) -> Batch:
    """Random tokens, every one with a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (2, batch, sequence), generator=generator)
    return Batch(ids[0], ids[1])


@dataclass
class Gradients:
    """The result of one backward pass: gradients by the names of parameters in transformers."""

    loss: float
    norm: float
    tensors: dict[str, Tensor]


def logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, T, V)"""
    return model(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits


def loss(model: PreTrainedModel, batches: list[Batch]) -> Tensor:
    """The mean loss over all valid tokens of all batches."""
    total = torch.zeros(())
    valid = 0
    for batch in batches:
        for sample in batch.samples():
            rows = logits(model, sample).flatten(0, 1)
            targets = sample.targets.flatten()
            total = total + F.cross_entropy(rows, targets, ignore_index=IGNORED, reduction="sum")
            valid += int((targets != IGNORED).sum())
    return total / valid


def gradients(model: PreTrainedModel, batches: list[Batch]) -> Gradients:
    """The gradients of the loss over all batches."""
    model.zero_grad(set_to_none=True)
    value = loss(model, batches)
    value.backward()
    tensors = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([tensor.double().norm() for tensor in tensors.values()]).norm()
    return Gradients(value.item(), norm.item(), tensors)


def gradient_errors(expected: Gradients, actual: Gradients) -> dict[str, float]:
    """For each tensor, the norm of the difference divided by the norm of the expected gradient. For
    a gradient that is zero except for rounding, the error relative to `GRADIENT_ZERO`, scaled so
    that it reaches `GRADIENT_RELATIVE` there."""
    assert expected.tensors.keys() == actual.tensors.keys()
    errors = {}
    for name, wanted in expected.tensors.items():
        got = actual.tensors[name]
        assert got.shape == wanted.shape, name
        size, difference = wanted.double().norm().item(), (got - wanted).double().norm().item()
        zero = GRADIENT_ZERO * expected.norm
        if size > zero:
            errors[name] = difference / size
        else:
            assert any(part in name for part in QUERY_AND_KEY), f"{name} learns nothing"
            errors[name] = difference / zero * GRADIENT_RELATIVE
    return errors


def check_gradients(expected: Gradients, actual: Gradients, record) -> None:
    """Asserts that the loss, the global norm and every gradient are within the limits. `record`
    gets the worst error of each."""
    errors = gradient_errors(expected, actual)
    worst = max(errors, key=errors.get)
    loss_error = abs(actual.loss - expected.loss)
    norm_error = abs(actual.norm / expected.norm - 1)
    record("loss", loss_error)
    record("gradient", errors[worst])
    record("gradient norm", norm_error)
    assert loss_error <= LOSS_ABSOLUTE
    assert errors[worst] <= GRADIENT_RELATIVE, f"{worst}: {errors[worst]:.2e}"
    assert norm_error <= GRADIENT_RELATIVE
