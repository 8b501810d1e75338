from pathlib import Path

import pytest

from reference_trainer.corpus import read_corpus
from reference_trainer.errors import UsageError


def test_default_is_the_standard_library_without_its_tests_and_installed_packages() -> None:
    corpus = read_corpus(None, limit_bytes=64_000_000)
    assert b"class OrderedDict(dict):" in corpus.text
    assert b"class TestOrderedDict" not in corpus.text
    assert b"def scaled_dot_product_attention" not in corpus.text


def test_limit_cuts_the_text_and_is_reported() -> None:
    corpus = read_corpus(None, limit_bytes=10_000)
    assert len(corpus.text) == 10_000
    assert corpus.cut


def test_folder_is_read_in_the_order_of_names_each_document_ended_by_a_zero(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.txt").write_text("third \N{SNOWMAN}")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00")
    corpus = read_corpus(tmp_path, limit_bytes=1000)
    assert corpus.text == "first\0second\0third \N{SNOWMAN}\0".encode()
    assert (corpus.num_files, corpus.num_files_skipped, corpus.cut) == (3, 1, False)


def test_limit_inside_a_character_does_not_make_a_file_binary(tmp_path: Path) -> None:
    path = tmp_path / "snow.txt"
    path.write_text("\N{SNOWMAN}" * 10)
    assert len(read_corpus(path, limit_bytes=10).text) == 10


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "is empty"), (b"\x7fELF\x00\x01", "is binary"), (b"\xff\xfe\xfd", "is binary")],
)
def test_file_without_text_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"--corpus .*data: the file {complaint}.*give a text file"):
        read_corpus(path, limit_bytes=1000)


def test_json_lines_without_a_letter_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('""\n{"text": ""}\n')
    with pytest.raises(UsageError, match="the texts in it are empty"):
        read_corpus(path, limit_bytes=1000)


def test_missing_path_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: no such file or folder; give a text file"):
        read_corpus(tmp_path / "nowhere", limit_bytes=1000)


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00")
    with pytest.raises(UsageError, match="the folder holds no UTF-8 text"):
        read_corpus(tmp_path, limit_bytes=1000)
