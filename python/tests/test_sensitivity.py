"""The comparisons can fail: a small change of any one tensor exceeds the limits."""

import copy

import pytest
import reference
import torch
from models import CONFIGS, VOCABULARY
from reference import random_batch


@pytest.mark.parametrize("name", CONFIGS)
def test_a_change_of_any_tensor_is_noticed(name, saved, storm):
    module, directory = saved(name, False)
    batch = random_batch(3, 7, VOCABULARY, seed=30)
    logits = storm.logits(directory, batch)
    actual = storm.gradients(directory, [batch], chunk_rows=5)
    generator = torch.Generator().manual_seed(31)
    for changed in module.state_dict():
        other = copy.deepcopy(module)
        tensor = other.state_dict()[changed]
        # A different factor for each element, because a norm would undo a common one.
        tensor.mul_(1 + 0.01 * torch.randn(tensor.shape, generator=generator))
        with torch.no_grad():
            logits_error = (reference.logits(other, batch) - logits).abs().max().item()
        errors = reference.gradient_errors(reference.gradients(other, [batch]), actual)
        assert logits_error > reference.LOGITS_ABSOLUTE, changed
        assert max(errors.values()) > reference.GRADIENT_RELATIVE, changed


def test_a_missing_part_is_noticed(saved, storm):
    """Reference models with one part of the architecture removed."""
    batch = random_batch(3, 33, VOCABULARY, seed=31)

    def check(name, change):
        module, directory = saved(name, False)
        other = copy.deepcopy(module)
        change(other)
        actual = storm.gradients(directory, [batch], chunk_rows=5)
        errors = reference.gradient_errors(reference.gradients(other, [batch]), actual)
        assert max(errors.values()) > 5 * reference.GRADIENT_RELATIVE, name

    def scale_rotary(model):
        model.model.rotary_emb.inv_freq[-1] *= 4  # As without Llama 3's scaling.

    def drop_key_norm(model):
        for layer in model.model.layers:
            layer.self_attn.k_norm.forward = lambda x, norm=layer.self_attn.k_norm: x * norm.weight

    def exact_gelu(model):
        for layer in model.transformer.h:
            layer.mlp.act = torch.nn.GELU()

    def coarse_epsilon(model):
        for layer in model.model.layers:
            layer.input_layernorm.variance_epsilon *= 100

    check("llama-rope3", scale_rotary)
    check("qwen3", drop_key_norm)
    check("llama", coarse_epsilon)
    check("gpt2", exact_gelu)
