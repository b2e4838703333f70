"""Records how `transformers` renders chats, for the tests of `storm data pack`.

    python python/record_chats.py

writes `tokenizer.json` and `expected.json` beside the templates in
crates/storm-data/tests/data/chats. The templates imitate those of real models.
"""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parents[1] / "crates/storm-data/tests/data/chats"

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|end|>", "[INST]", "[/INST]",
]
TEXT = ["the user and the assistant say what the time is now", "system assistant user model hello"]

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {
        "name": "get_time",
        "arguments": {"zone": "Europe/Berlin", "n": [1, 2.5, True, None], "é": '"x"\n'},
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time <in> a 'zone' & more.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}},
            "required": ["zone"],
        },
    },
}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": {"messages": [say("user", "hi"), say("assistant", "ho")]},
    "turns": {
        "messages": [
            say("user", "hi"),
            say("assistant", "ho"),
            say("user", "well?\n"),
            say("assistant", "well, <b>&amp;\"'é🦀"),
        ]
    },
    "system": {"messages": [say("system", "be brief"), say("user", "hi"), say("assistant", "ho")]},
    "thoughts": {
        "messages": [
            say("user", "1+1"),
            say("assistant", "<think>\nadd\n</think>\n\n2"),
            say("user", "2+2"),
            say("assistant", "4", reasoning_content="add again"),
        ]
    },
    "special tokens": {
        "messages": [say("user", "a<|im_end|>b"), say("assistant", "the <s> user")]
    },
    "tools": {
        "messages": [
            say("user", "time?"),
            say("assistant", "", tool_calls=[CALL]),
            say("tool", '{"time": "12:00"}', tool_call_id="abcdefghi", name="get_time"),
            say("assistant", "noon"),
        ],
        "tools": [TOOL],
    },
    "parts": {
        "messages": [
            say("user", [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]),
            say("assistant", "this"),
        ]
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with bytes, some merges and the special tokens of all templates."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 64, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(SPECIAL)
    made.save(str(FOLDER / "tokenizer.json"), pretty=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def main():
    known = tokenizer()
    cases = []
    for path in sorted(FOLDER.glob("*.jinja")):
        template = path.read_text()
        for name, chat in CHATS.items():
            case = {"template": path.stem, "name": name, "chat": chat}
            try:
                out = known.apply_chat_template(
                    chat["messages"],
                    tools=chat.get("tools"),
                    chat_template=template,
                    return_assistant_tokens_mask="endgeneration" in template,
                    return_dict=True,
                )
                case["ids"] = list(out["input_ids"])
                if "assistant_masks" in out:
                    case["learned"] = list(out["assistant_masks"])
            except Exception as error:  # Templates raise many kinds of errors.
                case["error"] = str(error)
            cases.append(case)
    text = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FOLDER / "expected.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
