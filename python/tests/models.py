"""Tiny random models of every family, with nothing left at zero, at one, or at a round size."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 131
CONTEXT_MAX = 70

# (B, T): shapes that no tile divides, and the smallest there is.
SHAPES = [(1, 1), (3, 7), (1, 33), (3, 70)]


def _llama_like(cls, hidden, heads, kv_heads, **more) -> PretrainedConfig:
    return cls(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT_MAX,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )


# Wavelengths of these 12 frequencies run from 6 to 429 tokens, so that with 32 original positions
# some are kept (below 8), some blended, some stretched (above 32).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS = {
    "gpt2": lambda **more: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT_MAX,
        n_embd=72,
        n_layer=2,
        n_head=3,
        n_inner=52,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    ),
    "llama": lambda **more: _llama_like(LlamaConfig, 40, 4, 4, rms_norm_eps=1e-5, **more),
    "llama-rope3": lambda **more: _llama_like(
        LlamaConfig, 72, 3, 1, rope_parameters=_LLAMA3_ROPE, **more
    ),
    "llama-biases": lambda **more: _llama_like(
        LlamaConfig, 40, 4, 2, attention_bias=True, mlp_bias=True, **more
    ),
    # A window as long as the longest sequence changes nothing.
    "mistral": lambda **more: _llama_like(
        MistralConfig, 72, 6, 2, sliding_window=CONTEXT_MAX, **more
    ),
    "mistral-head-dim": lambda **more: _llama_like(
        MistralConfig, 40, 3, 1, head_dim=24, sliding_window=None, **more
    ),
    "qwen2": lambda **more: _llama_like(Qwen2Config, 72, 6, 3, **more),
    "qwen3": lambda **more: _llama_like(Qwen3Config, 40, 4, 2, head_dim=18, **more),
    "qwen3-biases": lambda **more: _llama_like(
        Qwen3Config, 72, 3, 1, head_dim=34, attention_bias=True, **more
    ),
}

EVERY_MODEL = [(name, tied) for name in CONFIGS for tied in (True, False)]


def model_id(model: tuple[str, bool]) -> str:
    """How pytest names an entry of `EVERY_MODEL`."""
    name, tied = model
    return f"{name}-{'tied' if tied else 'untied'}"


def from_config(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with the weights that transformers gives it, without dropout."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def random_model(name: str, tied: bool) -> PreTrainedModel:
    """A model whose every parameter matters: wide weights, no zero biases, no plain norms."""
    config = CONFIGS[name](tie_word_embeddings=tied)
    model = from_config(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and key.endswith("weight")
        # With 0.2 attention is so peaked that PyTorch itself is 5e-5 from its logits in f64.
        parameter.data = 1 + 0.3 * noise if is_norm else 0.15 * noise
    return model


def load(directory: Path, **options) -> PreTrainedModel:
    """What transformers makes of a directory; it must hold exactly the tensors of its config."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, **options
    )
    assert not any(report.values()), f"{directory}: {report}"
    return model.eval()
