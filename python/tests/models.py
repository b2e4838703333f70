"""Tiny random models of every family, without weights of zero or one and without round sizes."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 131
CONTEXT_MAX = 70

# (B, T): the smallest shape, and shapes that no tile divides.
SHAPES = [(1, 1), (3, 7), (1, 33), (3, 70)]


def llama_like(cls, hidden, heads, kv_heads, **more) -> PretrainedConfig:
    """A config with two layers."""
    more.setdefault("max_position_embeddings", CONTEXT_MAX)
    return cls(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )


# Wavelengths of these 12 frequencies run from 6 to 429 tokens. So with 32 original positions, some
# are kept (below 8), some are blended, and some are stretched (above 32).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Within 32 positions, some of these pairs turn often and are kept, some turn rarely and are
# stretched, and some are blended.
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 3.0,
    "beta_slow": 0.3,
    "original_max_position_embeddings": 32,
}


def long_rope(pairs: int, original: int) -> dict:
    """A factor for each pair, and another factor for each beyond `original` positions."""
    return {
        "rope_type": "longrope",
        "rope_theta": 50.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
        "factor": 4.0,
        "original_max_position_embeddings": original,
    }


def dynamic_rope(positions: int) -> dict:
    """A model with this many positions, whose rotary base grows beyond them."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.5}
    return {"rope_parameters": rope, "max_position_embeddings": positions}


def _gpt2(**more) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT_MAX,
        n_embd=72,
        n_layer=2,
        n_head=3,
        n_inner=52,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )


CONFIGS = {
    "gpt2": _gpt2,
    "llama": lambda **more: llama_like(LlamaConfig, 40, 4, 4, rms_norm_eps=1e-5, **more),
    "llama-rope3": lambda **more: llama_like(
        LlamaConfig, 72, 3, 1, rope_parameters=_LLAMA3_ROPE, **more
    ),
    "llama-biases": lambda **more: llama_like(
        LlamaConfig, 40, 4, 2, attention_bias=True, mlp_bias=True, **more
    ),
    # A window as long as the longest sequence changes nothing.
    "mistral": lambda **more: llama_like(
        MistralConfig, 72, 6, 2, sliding_window=CONTEXT_MAX, **more
    ),
    "mistral-head-dim": lambda **more: llama_like(
        MistralConfig, 40, 3, 1, head_dim=24, sliding_window=None, **more
    ),
    "qwen2": lambda **more: llama_like(Qwen2Config, 72, 6, 3, **more),
    "qwen3": lambda **more: llama_like(Qwen3Config, 40, 4, 2, head_dim=18, **more),
    "qwen3-biases": lambda **more: llama_like(
        Qwen3Config, 72, 3, 1, head_dim=34, attention_bias=True, **more
    ),
}

EVERY_MODEL = [(name, tied) for name in CONFIGS for tied in (True, False)]

# Features of single models rather than of whole families.
VARIANTS = {
    "gpt2-gelu": lambda **more: _gpt2(activation_function="gelu", **more),
    "gpt2-relu": lambda **more: _gpt2(activation_function="relu", **more),
    # Windows shorter than the sequences, within one block of keys here and across two below.
    "mistral-window": lambda **more: llama_like(
        MistralConfig, 72, 6, 2, sliding_window=9, **more
    ),
    "qwen2-window": lambda **more: llama_like(
        Qwen2Config, 72, 6, 3, use_sliding_window=True, sliding_window=66, max_window_layers=1,
        **more
    ),
    "qwen3-mixed": lambda **more: llama_like(
        Qwen3Config, 40, 4, 2, head_dim=18, use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], **more
    ),
    "llama-linear": lambda **more: llama_like(
        LlamaConfig, 72, 3, 1,
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}, **more
    ),
    "qwen2-dynamic": lambda **more: llama_like(
        Qwen2Config, 72, 6, 3, **dynamic_rope(CONTEXT_MAX), **more
    ),
    "llama-yarn": lambda **more: llama_like(
        LlamaConfig, 72, 3, 1, rope_parameters=_YARN_ROPE, **more
    ),
    "qwen3-yarn": lambda **more: llama_like(
        Qwen3Config, 40, 4, 2, head_dim=18,
        rope_parameters={**_YARN_ROPE, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3},
        **more
    ),
    "mistral-longrope": lambda **more: llama_like(
        MistralConfig, 72, 6, 2, sliding_window=None,
        rope_parameters=long_rope(6, CONTEXT_MAX), **more
    ),
    # Heads of 20 elements, of which 15 count. They make 8 pairs. Also has a window.
    "phi3-partial": lambda **more: llama_like(
        Phi3Config, 80, 4, 2, partial_rotary_factor=0.75, sliding_window=20, pad_token_id=None, **more
    ),
    "phi3-longrope": lambda **more: llama_like(
        Phi3Config, 80, 4, 4, original_max_position_embeddings=CONTEXT_MAX, pad_token_id=None,
        rope_parameters={**long_rope(5, CONTEXT_MAX), "partial_rotary_factor": 0.5}, **more
    ),
    "llama-gelu": lambda **more: llama_like(LlamaConfig, 40, 4, 4, hidden_act="gelu", **more),
    "qwen2-gelu-tanh": lambda **more: llama_like(
        Qwen2Config, 72, 6, 3, hidden_act="gelu_pytorch_tanh", **more
    ),
    "mistral-relu": lambda **more: llama_like(
        MistralConfig, 72, 6, 2, sliding_window=None, hidden_act="relu", **more
    ),
}
CONFIGS |= VARIANTS

# Tying does not interact with these features, so each model has one or the other.
EVERY_MODEL += [(name, number % 2 == 0) for number, name in enumerate(VARIANTS)]


def model_id(model: tuple[str, bool]) -> str:
    """The name of an entry of `EVERY_MODEL` in pytest."""
    name, tied = model
    return f"{name}-{'tied' if tied else 'untied'}"


def from_config(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with the initial weights of transformers, without dropout."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def random_model(name: str, tied: bool) -> PreTrainedModel:
    """A model in which every parameter matters: large weights, no zero biases, no norms of ones."""
    return with_random_weights(from_config(CONFIGS[name](tie_word_embeddings=tied), seed=0))


def with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with new weights, all of which matter."""
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and key.endswith("weight")
        # With 0.2, attention is so peaked that PyTorch's logits in f32 differ from its logits in
        # f64 by 5e-5.
        parameter.data = 1 + 0.3 * noise if is_norm else 0.15 * noise
    return model


def load(directory: Path, **options) -> PreTrainedModel:
    """Loads a directory with transformers. It must have exactly the tensors of its config."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, **options
    )
    assert not any(report.values()), f"{directory}: {report}"
    return model.eval()
