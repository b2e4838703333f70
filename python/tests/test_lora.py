"""Compares adapters with PEFT: losses from the same start and data, and files that both read."""

import copy
import json

import pytest
import reference
import torch
import training
from models import CONFIGS, VOCABULARY, from_config, model_id, with_random_weights
from peft import LoraConfig, PeftModel, get_peft_model
from reference import random_batch
from safetensors.torch import load_file
from training import AdamW, Step, warmup_cosine

# Every family, tied and untied.
MODELS = [
    ("gpt2", True),
    ("llama", False),
    ("llama-biases", True),
    ("mistral", True),
    ("qwen2", True),
    ("qwen3", False),
    ("phi3-partial", False),
]

# PEFT's own names of modules, as lists, as patterns, and as `all-linear`.
OPTIONS = {
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    "llama": {"target_modules": "all-linear"},
    "llama-biases": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 3, "mlp.up_proj": 5},
        "alpha_pattern": {"v_proj": 11},
    },
    "mistral": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "qwen2": {"target_modules": r".*layers\.1\.(self_attn|mlp)\.\w+_proj"},
    "qwen3": {"target_modules": "all-linear", "modules_to_save": ["lm_head", "input_layernorm"]},
    "phi3-partial": {"target_modules": "all-linear"},
}

STEPS = 100


def fresh_adapter(name: str, tied: bool, folder) -> tuple[PeftModel, "Path", "Path"]:
    """A model with an adapter that PEFT created, and the directories of the base model and the
    adapter."""
    base = with_random_weights(from_config(CONFIGS[name](tie_word_embeddings=tied), seed=0))
    base_directory = folder / "base"
    base.save_pretrained(base_directory)
    torch.manual_seed(3)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, **OPTIONS[name]
    )
    model = get_peft_model(base, config)
    adapter = folder / "adapter"
    model.save_pretrained(adapter)
    return model, base_directory, adapter


def steps() -> list[Step]:
    """The same few batches repeat, so that there is something to learn."""
    return [
        Step(
            warmup_cosine(index, STEPS, peak=1e-2),
            [random_batch(2, 13, VOCABULARY, seed=index % 3)],
        )
        for index in range(STEPS)
    ]


def loaded(base: "Path", adapter: "Path") -> PeftModel:
    """The base model and the adapter, loaded by PEFT."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, attn_implementation="eager", dtype=torch.float32
    )
    return PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.parametrize("model", MODELS, ids=model_id)
def test_a_hundred_steps_against_peft(model, storm, record, tmp_path):
    trained, base, adapter = fresh_adapter(*model, tmp_path)
    settings = AdamW(max_norm=1.0)
    before = copy.deepcopy(trained)
    batch = random_batch(2, 17, VOCABULARY, seed=99)

    # PEFT trains only what requires a gradient.
    class Trainable:
        def __init__(self, module):
            self.module = module

        def parameters(self):
            return [p for p in self.module.parameters() if p.requires_grad]

        def __call__(self, *args, **options):
            return self.module(*args, **options)

    expected, _ = training.train(Trainable(trained), steps(), settings)
    assert expected[-1] < 0.9 * expected[0]
    ours = tmp_path / "ours"
    losses, _ = storm.train(
        base,
        adapter=adapter,
        save_adapter=ours,
        precision="f32",
        chunk_rows=7,
        **training.job(steps(), settings),
    )
    error = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    record("loss in 100 steps", error)
    assert error <= 1e-3

    # PEFT gets STORM's logits from what STORM saved, and STORM gets PEFT's from what PEFT saved.
    with torch.no_grad():
        for directory, module in [(ours, loaded(base, ours)), (adapter, before)]:
            wanted = reference.logits(module, batch)
            found = storm.logits(base, batch, adapter=directory)
            error = (found - wanted).abs().max().item()
            record("logits", error)
            assert error <= reference.LOGITS_ABSOLUTE


@pytest.mark.parametrize("model", [("llama-biases", True), ("qwen3", False)], ids=model_id)
def test_an_adapter_goes_through_unchanged(model, run_tool, tmp_path):
    """Reading and writing an adapter keeps all of its bits, and its logits in PEFT."""
    trained, base, adapter = fresh_adapter(*model, tmp_path)
    generator = torch.Generator().manual_seed(5)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    adapter = tmp_path / "changed"
    trained.save_pretrained(adapter)
    again = tmp_path / "again"
    run_tool("storm", "export", adapter, again, "--base-model", base)
    name = "adapter_model.safetensors"
    before, after = load_file(adapter / name), load_file(again / name)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    batch = random_batch(2, 17, VOCABULARY, seed=98)
    with torch.no_grad():
        wanted = reference.logits(loaded(base, adapter), batch)
        assert torch.equal(reference.logits(loaded(base, again), batch), wanted)
    config = json.loads((again / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)

    # Merged into the base, it is an ordinary model.
    merged = tmp_path / "merged"
    run_tool("storm", "merge", adapter, "--base-model", base, "--out", merged)
    from models import load

    with torch.no_grad():
        error = (reference.logits(load(merged), batch) - wanted).abs().max().item()
    assert error <= reference.LOGITS_ABSOLUTE
