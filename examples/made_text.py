"""Made text: a tiny model, a tokenizer and datasets that need no network, for the examples of trainers.

Sentences count in words, so that a model can learn them, and a few are long while most are short.

    python examples/made_text.py build/made

writes the model with its tokenizer and files of conversations, for trainers that read them from disk.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SPECIAL = ["<pad>", "<end>", "<unknown>", "<user>", "<assistant>"]
WORDS = [f"word{number}" for number in range(59)]
CHAT = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant> {% generation %}{{ message.content }} <end> {% endgeneration %}"
    "{% else %}<user> {{ message.content }} {% endif %}"
    "{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with a chat template that marks what the assistant says."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, "<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")
    made.chat_template = CHAT
    return made


def model() -> LlamaForCausalLM:
    """A Llama of two layers, with the same weights every time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def sentence(draw: random.Random) -> str:
    """Words that count up by a stride of their own; one in eight sentences is long."""
    start, stride = draw.randrange(len(WORDS)), draw.randrange(1, 4)
    count = draw.randrange(60, 90) if draw.random() < 0.125 else draw.randrange(2, 12)
    return " ".join(WORDS[(start + i * stride) % len(WORDS)] for i in range(count))


def chats(count: int, seed: int = 0) -> Dataset:
    """Conversations of one question and one answer."""
    draw = random.Random(seed)
    rows = [
        [{"role": "user", "content": sentence(draw)}, {"role": "assistant", "content": sentence(draw)}]
        for _ in range(count)
    ]
    return Dataset.from_dict({"messages": rows})


def pairs(count: int, seed: int = 0) -> Dataset:
    """Prompts with an answer that is preferred and one that is not."""
    draw = random.Random(seed)
    return Dataset.from_dict(
        {name: [sentence(draw) for _ in range(count)] for name in ("prompt", "chosen", "rejected")}
    )


def prompts(count: int, seed: int = 0) -> Dataset:
    """Prompts alone."""
    draw = random.Random(seed)
    return Dataset.from_dict({"prompt": [sentence(draw) for _ in range(count)]})


def write(folder: Path) -> None:
    """The model with its tokenizer, and conversations to train on and to evaluate."""
    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    chats(900).to_json(folder / "train.jsonl")
    chats(60, seed=1).to_json(folder / "held_out.jsonl")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
