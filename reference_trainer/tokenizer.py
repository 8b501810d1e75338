"""How text becomes numbers: a token a byte, or byte pairs learned from the corpus; free of torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference_trainer.corpus import DOCUMENT_END
from reference_trainer.errors import UsageError

TOKENIZERS = ("bytes", "bpe")
NUM_BYTES = 256
# Kept free above the tokens of text: mask, begin, padding, and room, so that the vocabulary stays a round number.
NUM_RESERVED = 8

# What a token says about the end of sentences, as bits.
ENDS_LINE, ENDS_WITH_STOP, STARTS_WITH_SPACE = 1, 2, 4

DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Number the tokens: text from 0, where 0 itself ends a document, then those that only denoising uses."""

    num_text_tokens: int

    @property
    def mask(self) -> int:
        """Return the token that stands for a span left out."""
        return self.num_text_tokens

    @property
    def begin(self) -> int:
        """Return the token before the first one of the decoder."""
        return self.num_text_tokens + 1

    @property
    def padding(self) -> int:
        """Return the token that fills up a row."""
        return self.num_text_tokens + 2


class Tokenizer(Protocol):
    """Turn the text of all documents into tokens."""

    def encode(self, text: bytes) -> NDArray[np.unsignedinteger]:
        """Return the tokens of all documents, each ended by token 0."""

    def mark_tokens(self) -> NDArray[np.uint8]:
        """Return for each token what it says about the end of sentences."""


class ByteTokenizer:
    """Take each byte for a token; byte 0, which no text holds, ends a document."""

    def encode(self, text: bytes) -> NDArray[np.unsignedinteger]:
        """Return the bytes as numbers."""
        return np.frombuffer(text, dtype=np.uint8)

    def mark_tokens(self) -> NDArray[np.uint8]:
        """Mark the bytes that end a line or a sentence, or stand between words."""
        return mark_spellings([bytes([byte]) for byte in range(NUM_BYTES)])


class PairTokenizer:
    """Join the commonest neighbours of the corpus to tokens: byte-pair encoding, by the library `tokenizers`."""

    def __init__(self, text: bytes, *, num_tokens: int) -> None:
        if num_tokens <= NUM_BYTES:
            raise UsageError(
                f"--tokenizer bpe joins bytes to more than {NUM_BYTES} tokens, but the vocabulary of the model leaves "
                f"{num_tokens} for text; give --vocabulary-size {2 * NUM_BYTES} or more, or --tokenizer bytes"
            )
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
            from tokenizers import models, pre_tokenizers, trainers
        except ImportError as error:
            raise UsageError(
                "--tokenizer bpe needs the package tokenizers, which is not installed; run pip install tokenizers, "
                "or give --tokenizer bytes"
            ) from error
        self.num_tokens = num_tokens
        self.library = LibraryTokenizer(models.BPE())
        self.library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        # The first special token gets number 0: the end of a document, as for bytes.
        trainer = trainers.BpeTrainer(
            vocab_size=num_tokens,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.library.train_from_iterator(split_documents(text), trainer)

    def encode(self, text: bytes) -> NDArray[np.unsignedinteger]:
        """Return the tokens of all documents, each ended by token 0."""
        width = np.uint16 if self.num_tokens <= np.iinfo(np.uint16).max + 1 else np.uint32
        pieces = []
        documents = split_documents(text)
        while some := list(islice(documents, DOCUMENTS_AT_ONCE)):
            pieces += [np.array([*encoding.ids, 0], dtype=width) for encoding in self.library.encode_batch(some)]
        return np.concatenate(pieces)

    def mark_tokens(self) -> NDArray[np.uint8]:
        """Mark the tokens by the bytes that they stand for."""
        spellings = [b""] * self.num_tokens
        to_byte = {character: byte for byte, character in _spell_bytes().items()}
        for token, number in self.library.get_vocab().items():
            spellings[number] = DOCUMENT_END if number == 0 else bytes(to_byte[character] for character in token)
        return mark_spellings(spellings)

    def save(self, path: Path) -> None:
        """Write it in the format of the library, for use elsewhere."""
        self.library.save(str(path))


def mark_spellings(spellings: list[bytes]) -> NDArray[np.uint8]:
    """Say for each token whether it ends a line, ends with a full stop or the like, and starts with white space."""
    return np.array(
        [
            (ENDS_LINE if spelling.endswith((b"\n", DOCUMENT_END)) else 0)
            | (ENDS_WITH_STOP if spelling.endswith((b".", b"!", b"?")) else 0)
            | (STARTS_WITH_SPACE if spelling.startswith((b" ", b"\t", b"\n", DOCUMENT_END)) else 0)
            for spelling in spellings
        ],
        dtype=np.uint8,
    )


def split_documents(text: bytes) -> Iterator[str]:
    """Yield the documents without their ends; the limit of the corpus may have cut the last inside a character."""
    return (document.decode("utf-8", errors="ignore") for document in text.split(DOCUMENT_END) if document)


def _spell_bytes() -> dict[int, str]:
    """Return the printable character that byte-level pairs write for each byte: itself, or one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + place) for place, byte in enumerate(others)}
