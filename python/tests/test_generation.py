"""Compares greedy text of `storm sample` with that of `transformers.generate`, token by token."""

import json
from pathlib import Path

import pytest
import torch
from models import VOCABULARY, random_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "mistral-window", "qwen3-mixed", "phi3-partial"]
NEW_TOKENS = 24

# Two orders of summing in f32 change a logit of these models by much less than this.
CLEAR_GAP = 1e-3

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>", "<|done|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|> {{ message.role }} {{ message.content }} <|done|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|> assistant{% endif %}"
)


def make_tokenizer(has_bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with a word for each token of the models."""
    words = ["user", "assistant", *(f"w{n}" for n in range(VOCABULARY - len(SPECIAL) - 2))]
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def greedy(model: PreTrainedModel, prompt: list[int], eos: int | None) -> list[int]:
    """The tokens that `generate` adds. Every choice must be clear, because near a tie rounding
    would decide."""
    ids = torch.tensor([prompt])
    # The model's own eos would end the text elsewhere.
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = 0
    added = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )[0, len(prompt) :]
    with torch.no_grad():
        logits = model(torch.cat([ids[0], added])[None, :-1]).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    gap = (best[:, 0] - best[:, 1]).min().item()
    assert gap > CLEAR_GAP, f"two tokens are as likely ({gap:.1e}): take another prompt"
    return added.tolist()


class Sampler:
    """Runs `storm sample`, which always takes the likeliest token."""

    def __init__(self, run_tool, directory: Path):
        self._run_tool = run_tool
        self._directory = directory

    def __call__(self, prompt: str, *more: object) -> dict:
        flags = ["--prompt", prompt, "--temperature", 0, "--tokens", NEW_TOKENS, "--json", *more]
        return json.loads(self._run_tool("storm", "sample", self._directory, *flags))


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.mark.parametrize("has_bos", [False, True], ids=["plain", "bos"])
def test_greedy_text_is_that_of_generate(family, has_bos, run_tool, tmp_path):
    model = random_model(family, tied=False)
    tokenizer = make_tokenizer(has_bos)
    sample = Sampler(run_tool, tmp_path)

    def save(eos: int | list[int] | None) -> None:
        model.config.eos_token_id = None
        model.generation_config.eos_token_id = eos
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)

    save([VOCABULARY - 1])
    prompt = "w5 w17 w3 <|done|> w90 w41"
    ids = tokenizer(prompt).input_ids
    assert (ids[0] == tokenizer.bos_token_id) is has_bos
    expected = greedy(model, ids, None)
    assert VOCABULARY - 1 not in expected
    found = sample(prompt)
    assert found["prompt_tokens"] == ids
    assert (found["tokens"], found["finish"]) == (expected, "length")
    assert found["text"].split() == tokenizer.decode(expected).split()

    # A token that occurs in the text now ends it.
    end = expected[NEW_TOKENS // 2]
    shorter = greedy(model, ids, end)
    assert shorter == expected[: expected.index(end) + 1]
    save([0, end])
    found = sample(prompt)
    assert (found["tokens"], found["finish"]) == (shorter[:-1], "end")


def test_a_chat_prompt_is_that_of_apply_chat_template(family, run_tool, tmp_path):
    model = random_model(family, tied=False)
    tokenizer = make_tokenizer(has_bos=True)
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = VOCABULARY - 1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "w9 w80 w62"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = greedy(model, ids, None)
    found = Sampler(run_tool, tmp_path)("w9 w80 w62", "--chat")
    assert found["prompt_tokens"] == ids
    # An answer ends at the template's text after it, at the tokenizer's eos, or at the model's eos.
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("</s>", "<|done|>")}
    ends.add(VOCABULARY - 1)
    cut = next((at for at, token in enumerate(expected) if token in ends), NEW_TOKENS)
    assert found["tokens"] == expected[:cut]
