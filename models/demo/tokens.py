"""Text to tokens to packed batches: the demo model's tokenizer, its documents, and how they fill a batch.

Knows: the byte-level BPE recipe, the document and chat forms, packing with boundaries.
Does not know: where units come from (corpus.py), the network, the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.demo.corpus import SPECIAL_STRINGS, Unit, stable_hash
from models.demo.network import Packed

END_OF_TEXT, PAD, TURN_START, TURN_END = SPECIAL_STRINGS
CHAT_ONE_IN = 3  # of the units with a summary; those are seen both bare and as an answer


def as_documents(units: Sequence[Unit]) -> list[str]:
    """The training texts: every unit bare, a third of those with a summary once more as a chat answer, all ended."""
    bare = [unit.code + END_OF_TEXT for unit in units]
    chats = [
        f"{TURN_START}user\n{unit.request}{TURN_END}\n{TURN_START}assistant\n{unit.code}{TURN_END}\n{END_OF_TEXT}"
        for unit in units
        if unit.request and stable_hash(unit.code) % CHAT_ONE_IN == 0
    ]
    return bare + chats


def train_tokenizer(units: Sequence[Unit], vocab_size: int, characters: int, seed: int) -> Tokenizer:
    """Byte-level BPE (no normaliser, so every text comes back as it was) on a random sample of the units."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_STRINGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        taken = 0
        for index in np.random.default_rng(seed).permutation(len(units)):
            if taken >= characters:
                return
            taken += len(units[index].code)
            yield units[index].code

    tokenizer.train_from_iterator(sample(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}: too little text")
    return tokenizer


class TokenStore:
    """All documents of a split as one uint16 array, and where each begins; hands out packed batches."""

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[str], longest: int) -> None:
        pieces: list[np.ndarray] = []
        for start in range(0, len(documents), 20_000):
            batch = tokenizer.encode_batch_fast(documents[start : start + 20_000])
            pieces.extend(np.array(encoding.ids[:longest], dtype=np.uint16) for encoding in batch)
        self.ids = np.concatenate(pieces)
        self.starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batches(self, tokens: int, seed: int, device: torch.device) -> Iterator[Packed]:
        """Endless batches of whole documents in a new random order each epoch; the last of a batch is cut to fit."""
        random = np.random.default_rng(seed)
        chosen: list[np.ndarray] = []
        room = tokens
        while True:
            for index in random.permutation(len(self)):
                document = self.ids[self.starts[index] : self.starts[index + 1]][:room]
                chosen.append(document)
                room -= len(document)
                if room == 0:
                    yield pack(chosen, device)
                    chosen, room = [], tokens


def pack(documents: Sequence[np.ndarray], device: torch.device) -> Packed:
    """Lay documents end to end; a document's last token predicts nothing (what follows is another document)."""
    lengths = np.array([len(document) for document in documents])
    ends = np.cumsum(lengths)
    ids = np.concatenate(documents).astype(np.int64)
    targets = np.append(ids[1:], -100)
    targets[ends - 1] = -100
    positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    starts = np.concatenate([[0], ends]).astype(np.int32)

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return Packed(move(ids), move(positions), move(targets), move(starts), tuple(lengths.tolist()))
