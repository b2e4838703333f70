"""Hugging Face directories that STORM writes for transformers, bit for bit, and reads from it."""

import json

import pytest
import reference
import torch
from models import EVERY_MODEL, VOCABULARY, load, model_id
from reference import random_batch

every_model = pytest.mark.parametrize("model", EVERY_MODEL, ids=model_id)

# Small enough that each model takes several files.
SHARD_BYTES = 40_000

BATCH = random_batch(2, 23, VOCABULARY, seed=20)


def settings(model) -> dict:
    """The config without the path that it was loaded from."""
    return {**model.config.to_dict(), "_name_or_path": None}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return reference.logits(model, BATCH)


@every_model
@pytest.mark.parametrize("shard_bytes", [None, SHARD_BYTES], ids=["single", "sharded"])
def test_saved_model_is_the_same_in_transformers(model, shard_bytes, saved, storm, tmp_path):
    module, directory = saved(*model)
    output = tmp_path / "output"
    storm.round_trip(directory, directory=output, dtype="f32", shard_bytes=shard_bytes)
    files = len(list(output.glob("*.safetensors")))
    assert files == 1 if shard_bytes is None else files > 1
    loaded = load(output)
    assert torch.equal(logits(loaded), logits(module))
    assert settings(loaded) == settings(load(directory))


@every_model
def test_bf16_is_rounded_to_nearest(model, saved, storm, tmp_path):
    module, directory = saved(*model)
    output = tmp_path / "output"
    storm.round_trip(directory, directory=output, dtype="bf16")
    loaded = load(output, dtype="auto").state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(loaded[name], value.bfloat16()), name


@every_model
def test_sharded_model_of_transformers_is_read(model, saved, storm, tmp_path):
    module, directory = saved(*model)
    module.save_pretrained(tmp_path, max_shard_size=SHARD_BYTES)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(storm.logits(tmp_path, BATCH), storm.logits(directory, BATCH))


def test_tokenizer_and_generation_files_are_carried_along(saved, storm, tmp_path):
    module, _ = saved("qwen2", False)
    source, output = tmp_path / "source", tmp_path / "output"
    module.save_pretrained(source)
    contents = {
        "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE"}}',
        "tokenizer_config.json": '{"model_max_length": 70}',
        "generation_config.json": '{"temperature": 0.6, "do_sample": true}',
        "merges.txt": "#version: 0.2\nt h\n",
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in contents.items():
        (source / name).write_text(text)
    storm.round_trip(source, directory=output, dtype="f32")
    for name, text in contents.items():
        assert (output / name).read_text() == text
    assert load(output).generation_config.temperature == 0.6
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == "float32"
