import json
import math
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from reference_trainer import token_file
from reference_trainer.errors import UsageError
from reference_trainer.token_file import TokenFile, compute_entropy, find_cache, prepare_tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("abab")
    (folder / "b.txt").write_text("ab \N{SNOWMAN}")
    return folder


def prepare(path: Path | None, *, tokenizer: str = "bytes", num_text_tokens: int = 256) -> TokenFile:
    return prepare_tokens(path, limit_bytes=100_000, tokenizer=tokenizer, num_text_tokens=num_text_tokens)


def test_bytes_are_kept_with_their_ends_and_what_is_known_of_them(corpus: Path) -> None:
    file = prepare(corpus)
    assert bytes(file.tokens) == "abab\0ab \N{SNOWMAN}\0".encode()
    assert isinstance(file.tokens, np.memmap)
    assert (file.facts.num_tokens, file.facts.num_files) == (12, 2)
    assert (file.vocabulary.mask, file.vocabulary.begin, file.vocabulary.padding) == (256, 257, 258)


def test_entropy_is_that_of_the_shares_of_tokens() -> None:
    # Shares 1/2, 1/4, 1/4: ln 2 / 2 + 2 * ln 4 / 4 = 1.5 ln 2
    assert compute_entropy(np.array([7, 7, 9, 0], dtype=np.uint8)) == pytest.approx(1.5 * math.log(2))


def test_tokens_are_made_once_and_again_after_a_change(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(corpus)
    monkeypatch.setattr(token_file, "read_corpus", lambda *_, **__: pytest.fail("read again"))
    prepare(corpus)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus.parent / "cache"))
    (corpus / "b.txt").write_text("changed")
    assert b"changed" in bytes(prepare(corpus).tokens)


def _prepare_and_count(path: Path, made: Path) -> None:
    original = token_file._make

    def make(*arguments: object) -> None:
        (made / str(os.getpid())).touch()
        original(*arguments)  # type: ignore[arg-type]

    token_file._make = make  # type: ignore[assignment]
    assert len(prepare(path).tokens) == 12


def test_of_many_ranks_one_makes_the_tokens(corpus: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_prepare_and_count, args=(corpus, made)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 6
    assert len(list(made.iterdir())) == 1


def test_what_a_killed_rank_left_unfinished_is_not_taken_for_whole(corpus: Path) -> None:
    folder = find_cache() / "unfinished"
    folder.mkdir()
    (folder / "tokens.npy").touch()
    assert len(prepare(corpus).tokens) == 12


def test_json_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "first\0"}) + "\n\n" + json.dumps("second") + "\n")
    assert bytes(prepare(path).tokens) == b"first\0second\0"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "line 2: this is not JSON"), ('{"txt": "a"}', "line 2: no text in it"), ("3", "line 2: no text in it")],
)
def test_json_line_without_text_is_refused_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('"fine"\n' + line + "\n")
    with pytest.raises(UsageError, match=complaint):
        prepare(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "no such file or folder"), (b"", "is empty"), (b"\x7fELF\0", "is binary")],
)
def test_unfit_corpus_is_refused_and_nothing_kept(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(UsageError, match=complaint):
            prepare(path)
    assert [entry.suffix for entry in find_cache().iterdir() if entry.is_dir()] == []


def test_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert find_cache() == tmp_path / f"reference_trainer-{os.getuid()}"


def test_pairs_are_shorter_than_bytes_and_spell_the_same_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "text.txt"
    text = "the cat sat. The cat said: \N{SNOWMAN}!\nthe end\n" * 50
    path.write_text(text)
    file = prepare(path, tokenizer="bpe", num_text_tokens=300)
    assert file.facts.num_tokens < len(text) / 2
    assert file.tokens[-1] == 0
    assert 0 not in file.tokens[:-1]
    library = tokenizers.Tokenizer.from_file(str(Path(file.tokens.filename).parent / "tokenizer.json"))
    library.decoder = tokenizers.decoders.ByteLevel()
    assert library.decode(list(file.tokens[:-1])) == text
    # Line ends are marked, whatever they have been joined with.
    ending = [token for token in set(file.tokens.tolist()) if library.decode([token]).endswith("\n")]
    assert ending
    assert all(file.marks[token] & 1 for token in ending)


def test_pairs_need_room_in_the_vocabulary(corpus: Path) -> None:
    with pytest.raises(UsageError, match="give --vocabulary-size 512 or more"):
        prepare(corpus, tokenizer="bpe", num_text_tokens=256)
