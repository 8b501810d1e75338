"""The corpus as one file of tokens that all ranks of a machine map into memory; made once, and kept; free of torch."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference_trainer.corpus import Corpus, find_source, list_files, read_corpus
from reference_trainer.errors import UsageError
from reference_trainer.tokenizer import ByteTokenizer, PairTokenizer, Tokenizer, Vocabulary

FORMAT = 1
TOKENS, MARKS, FACTS, PAIRS = "tokens.npy", "marks.npy", "facts.json", "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Describe the corpus and its tokens; kept beside them."""

    source: str
    num_files: int
    num_files_skipped: int
    cut: bool
    num_bytes: int
    tokenizer: str
    num_text_tokens: int
    num_tokens: int
    entropy_nats: float


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Hold the tokens of all documents, mapped into memory, and what is known of them."""

    tokens: NDArray[np.unsignedinteger]
    marks: NDArray[np.uint8]
    vocabulary: Vocabulary
    facts: Facts

    def describe(self) -> str:
        """Say what is trained on, in a line."""
        facts = self.facts
        size = f"{'the first ' if facts.cut else ''}{facts.num_bytes / 1e6:.1f} MB in {facts.num_files} files"
        skipped = f" (left out as not UTF-8 text: {facts.num_files_skipped})" if facts.num_files_skipped else ""
        unit = "byte" if facts.tokenizer == "bytes" else f"token of {facts.num_bytes / facts.num_tokens:.1f} bytes"
        return f"{size} of {facts.source}{skipped}; unigram entropy {facts.entropy_nats:.3f} nats a {unit}"


def prepare_tokens(path: Path | None, *, limit_bytes: int, tokenizer: str, num_text_tokens: int) -> TokenFile:
    """Return the tokens of a corpus; the first rank to come makes them, while others wait for its lock.

    What is made is kept for the next run, until a file of the corpus changes.
    """
    if path is not None and not path.exists():
        read_corpus(path, limit_bytes=limit_bytes)  # says what is wrong
    folder = find_cache() / _name_content(path, limit_bytes, tokenizer, num_text_tokens)
    if not folder.is_dir():
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _make(folder, read_corpus(path, limit_bytes=limit_bytes), tokenizer, num_text_tokens)
    return open_tokens(folder)


def open_tokens(folder: Path) -> TokenFile:
    """Map what was made into memory."""
    facts = Facts(**json.loads((folder / FACTS).read_text(encoding="utf-8")))
    return TokenFile(
        tokens=np.load(folder / TOKENS, mmap_mode="r"),
        marks=np.load(folder / MARKS),
        vocabulary=Vocabulary(num_text_tokens=facts.num_text_tokens),
        facts=facts,
    )


def compute_entropy(tokens: NDArray[np.unsignedinteger]) -> float:
    """Return the unigram entropy in nats: the loss of the best guess that looks at no other token."""
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def find_cache() -> Path:
    """Return the folder for token files: the user's cache, or where that cannot be written, one of this user's own."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "reference_trainer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"reference_trainer-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _name_content(path: Path | None, limit_bytes: int, tokenizer: str, num_text_tokens: int) -> str:
    """Return a name that changes with the files of the corpus and with how they are turned into tokens."""
    digest = hashlib.sha256(repr((FORMAT, str(find_source(path).resolve()), limit_bytes)).encode())
    digest.update(repr((tokenizer, num_text_tokens)).encode())
    for file in list_files(path):
        status = file.stat()
        digest.update(repr((str(file), status.st_size, status.st_mtime_ns)).encode("utf-8", errors="surrogateescape"))
    return digest.hexdigest()[:24]


def _make(folder: Path, corpus: Corpus, tokenizer: str, num_text_tokens: int) -> None:
    """Write all files in a folder of another name first: what bears the right name is whole."""
    made: Tokenizer = ByteTokenizer()
    if tokenizer == "bpe":
        made = PairTokenizer(corpus.text, num_tokens=num_text_tokens)
    tokens = made.encode(corpus.text)
    facts = Facts(
        source=str(corpus.source),
        num_files=corpus.num_files,
        num_files_skipped=corpus.num_files_skipped,
        cut=corpus.cut,
        num_bytes=len(corpus.text),
        tokenizer=tokenizer,
        num_text_tokens=num_text_tokens,
        num_tokens=len(tokens),
        entropy_nats=compute_entropy(tokens),
    )
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        np.save(unfinished / TOKENS, tokens)
        np.save(unfinished / MARKS, made.mark_tokens())
        if isinstance(made, PairTokenizer):
            made.save(unfinished / PAIRS)
        (unfinished / FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        raise UsageError(
            f"the tokens of the corpus cannot be kept in {folder.parent} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder with room"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; that of a rank that dies is free again."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
