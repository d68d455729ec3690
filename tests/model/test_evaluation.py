"""Validation texts cut into halves: together they are the text, and both have each kind of it."""

from __future__ import annotations

from pathlib import Path

from model.evaluation import MIN_DOCUMENTS, documents, halved


def test_many_documents_are_dealt_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{n}\n<|endoftext|>\n" for n in range(MIN_DOCUMENTS + 1)))
    numbers = [[int(text) for text in documents(path, half)] for half in ("first", "second")]
    assert numbers == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]


def test_books_are_cut_where_the_paragraph_nearest_to_the_middle_begins() -> None:
    long, short = "a" * 50 + "\n\n" + "b" * 20 + "\n \n" + "c" * 30, "d\n\ne\n"
    first, second = halved([long, short], "first"), halved([long, short], "second")
    assert first == ["a" * 50 + "\n\n", "d\n\n"]
    assert second == ["b" * 20 + "\n \n" + "c" * 30, "e\n"]


def test_text_of_one_paragraph_is_all_in_the_first_half() -> None:
    assert halved(["one\nparagraph\n"], "first") == ["one\nparagraph\n"]
    assert halved(["one\nparagraph\n"], "second") == []


def test_no_half_is_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("a\n\nb\n<|endoftext|>\nc\n")
    assert list(documents(path)) == ["a\n\nb\n", "c\n"]
