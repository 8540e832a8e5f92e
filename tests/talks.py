"""Conversations, tokenizers to encode them with, and what the tokens stand for."""

import json

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from omniload.transforms.text import (
    ConversationEncoder,
    LoadedTokenizer,
    load_template,
    load_tokenizer,
)
from omniload.types import Message

__all__ = [
    "CORPUS",
    "TALK",
    "TEMPLATES",
    "byte_level",
    "labelled",
    "loaded",
    "make_encoder",
    "metaspace",
    "read",
    "rendered",
    "turn",
    "unigram",
]


TEMPLATES = ("chatml", "vicuna", "llama3")


def turn(role, content, weight=None):
    return Message(role=role, content=content, weight=weight)


TALK = [
    turn("user", "<image>\nWhat is in the image?"),
    turn("assistant", "A cat."),
    turn("user", "And in this one?<image>"),
    turn("assistant", "A picture of the world."),
]


def make_encoder(template="chatml", tokenizer=None, **options):
    options = {"tokens_per_tile": 2, **options}
    return ConversationEncoder(
        tokenizer=tokenizer or load_tokenizer(), template=load_template(template), **options
    )


def read(encoder, ids):
    """What token ids stand for: bytes as text, control tokens by name (embedded tokenizer)."""
    tokenizer = Tokenizer.from_str(encoder.tokenizer_json())
    out = bytearray()
    for token in ids:
        out += bytes([token]) if token < 256 else tokenizer.id_to_token(int(token)).encode()
    return out.decode()


def labelled(encoder, encoded):
    return read(encoder, encoded.labels[encoded.labels >= 0])


def rendered(template, messages):
    """The whole conversation as one text, images as the private character U+E000; no bos."""
    default = template.default_system
    if default and messages[0].role != "system":
        messages = [turn("system", default), *messages]
    text = ""
    for message in messages:
        role = template.roles[message.role]
        content = message.content.strip() if template.trim else message.content
        content = content.replace("<image>", "\ue000")
        text += role.prefix + role.content_prefix + content + role.end + role.suffix
    return text


# to train tokenizers with
CORPUS = [
    "Hello world, this is a picture of a cat.\nWhat is in the image? And in this one? user",
    "USER: Be brief. ASSISTANT: yes system assistant You are a helpful assistant.",
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives",
    "Yes.\n\nNo.\n\n\nYes. <| <| <|",
] * 20


def loaded(tokenizer, trainer, name):
    tokenizer.train_from_iterator(CORPUS, trainer)
    return LoadedTokenizer(json=tokenizer.to_str(), name=name)


def byte_level():
    """As the tokenizers of Qwen and Llama 3: line breaks stay together, then bytes."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\s*[\r\n]+|\s+(?!\S)| ?[^\s]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    return loaded(tokenizer, trainer, "byte-level")


def metaspace(scheme):
    """As SentencePiece BPE: a space before the text, bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    facts = json.loads(loaded(tokenizer, trainer, "").json)
    vocabulary = facts["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return LoadedTokenizer(json=json.dumps(facts), name=f"metaspace-{scheme}")


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        unk_token="<unk>",
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    return loaded(tokenizer, trainer, "unigram")
