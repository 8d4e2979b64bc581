"""Two tokenizers small enough to build in a test, of the two kinds that models ship."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.frontend.tokenizer import Tokenizer

_TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "def main():\n    return 0\n\nif __name__ == '__main__':\n    main()\n",
    "héllo wörld ñandú naïve café",
    "你好，世界。こんにちは世界",
    "👋🌍 👩‍👩‍👧 🇩🇪",
]


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2 style: any bytes are tokens, so one character may be spread over several."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_TEXT, trainer)
    return backend


@cache
def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama-2 style: a leading-space mark, bytes as <0xNN> tokens, a decoder that strips the first space, BOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "▁a", "▁t", "th", "▁th", "▁the", "lo", "el", "hel", "▁hel"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "o"), ("e", "l"), ("h", "el"), ("▁", "hel")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def panicking_backend() -> tokenizers.Tokenizer:
    """Fails on every text as a regular expression does that gives up on one: with an error that is no Exception."""
    backend = byte_level_backend().__class__.from_str(byte_level_backend().to_str())
    backend.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
    return backend


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend())


def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend())


def save(backend: tokenizers.Tokenizer, folder: Path) -> None:
    backend.save(str(folder / "tokenizer.json"))
