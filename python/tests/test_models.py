"""Compares every family with transformers in f32: logits, loss, and all gradients."""

import pytest
import reference
import torch
from models import (
    EVERY_MODEL,
    SHAPES,
    VOCABULARY,
    dynamic_rope,
    from_config,
    llama_like,
    long_rope,
    model_id,
    random_model,
    with_random_weights,
)
from reference import IGNORED, Batch, random_batch
from transformers import LlamaConfig

every_model = pytest.mark.parametrize("model", EVERY_MODEL, ids=model_id)

# Rows of logits in a chunk: few, so that the last chunk is shorter, and all at once.
FEW_ROWS, ALL_ROWS = 5, 1024


def check_logits(expected, actual, record) -> None:
    error = (actual - expected).abs().max().item()
    record("logits", error)
    assert error <= reference.LOGITS_ABSOLUTE


@every_model
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_whole_batch(model, shape, saved, storm, record):
    module, directory = saved(*model)
    batch = random_batch(*shape, VOCABULARY, seed=2)
    with torch.no_grad():
        check_logits(reference.logits(module, batch), storm.logits(directory, batch), record)
    expected = reference.gradients(module, [batch])
    actual = storm.gradients(directory, [batch], ALL_ROWS)
    reference.check_gradients(expected, actual, record)


@every_model
def test_padding_and_ignored_labels(model, saved, storm, record):
    module, directory = saved(*model)
    lengths = torch.tensor([33, 12, 1])
    batch = random_batch(3, 33, VOCABULARY, seed=3)
    batch.attention_mask = (torch.arange(33) < lengths[:, None]).long()
    batch.targets[batch.attention_mask == 0] = IGNORED
    batch.targets[0, 5:9] = IGNORED
    batch.targets[1, ::3] = IGNORED
    with torch.no_grad():
        is_token = batch.attention_mask == 1
        expected, actual = reference.logits(module, batch), storm.logits(directory, batch)
        check_logits(expected[is_token], actual[is_token], record)
    expected = reference.gradients(module, [batch])
    actual = storm.gradients(directory, [batch], FEW_ROWS)
    reference.check_gradients(expected, actual, record)


def packed_batch(seed: int) -> Batch:
    """Rows of several samples. One sample is a single token, one is as long as the row."""
    batch = random_batch(3, 41, VOCABULARY, seed)
    segments = [[0] * 7 + [1] * 1 + [2] * 20 + [3] * 13, [4] * 41, [0] * 33 + [7] * 8]
    batch.segments = torch.tensor(segments)
    ends = batch.segments[:, 1:] != batch.segments[:, :-1]
    batch.targets[:, :-1][ends] = IGNORED
    return batch


@every_model
def test_packed_segments(model, saved, storm, record):
    module, directory = saved(*model)
    batch = packed_batch(seed=4)
    with torch.no_grad():
        samples = [reference.logits(module, sample)[0] for sample in batch.samples()]
        expected = torch.cat(samples).view(*batch.tokens.shape, VOCABULARY)
        check_logits(expected, storm.logits(directory, batch), record)
    expected = reference.gradients(module, [batch])
    actual = storm.gradients(directory, [batch], FEW_ROWS)
    reference.check_gradients(expected, actual, record)


@every_model
def test_unequal_micro_batches_are_the_joint_batch(model, saved, storm, record):
    module, directory = saved(*model)
    batches = [random_batch(2, 17, VOCABULARY, seed) for seed in (5, 6)]
    batches[1].targets[0, 3:] = IGNORED
    batches[1].targets[1, :] = IGNORED
    columns = zip(*((batch.tokens, batch.targets) for batch in batches))
    joint = Batch(*(torch.cat(column) for column in columns))
    expected = reference.gradients(module, [joint])
    actual = storm.gradients(directory, batches, FEW_ROWS)
    reference.check_gradients(expected, actual, record)


@pytest.mark.parametrize("model", [("gpt2", True), ("qwen3", False)], ids=model_id)
def test_packed_micro_batches(model, saved, storm, record):
    module, directory = saved(*model)
    batches = [packed_batch(seed=7), packed_batch(seed=8), packed_batch(seed=9)]
    batches[2].targets[1:] = IGNORED
    expected = reference.gradients(module, batches)
    actual = storm.gradients(directory, batches, FEW_ROWS)
    reference.check_gradients(expected, actual, record)


# Beyond 16 positions the frequencies change. Transformers chooses them by the length of the batch.
LENGTHS = [16, 17, 41, 70]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_scaling_that_follows_the_length(kind, length, storm, record, tmp_path):
    more = {"longrope": {"rope_parameters": long_rope(5, 16)}, "dynamic": dynamic_rope(16)}[kind]
    config = llama_like(LlamaConfig, 40, 4, 2, tie_word_embeddings=True, **more)
    module = with_random_weights(from_config(config, seed=0))
    module.save_pretrained(tmp_path)
    batch = random_batch(2, length, VOCABULARY, seed=2)
    with torch.no_grad():
        check_logits(reference.logits(module, batch), storm.logits(tmp_path, batch), record)
    expected = reference.gradients(module, [batch])
    actual = storm.gradients(tmp_path, [batch], ALL_ROWS)
    reference.check_gradients(expected, actual, record)


def test_f64_weights(storm, record, tmp_path):
    module = random_model("llama", True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = parameter.data.double() * (1 + 1e-12)
    module.save_pretrained(tmp_path)
    batch = random_batch(2, 33, VOCABULARY, seed=2)
    with torch.no_grad():
        expected = reference.logits(module.float(), batch)
        check_logits(expected, storm.logits(tmp_path, batch), record)
