"""The table of pairs: what a row says, and which rows a page keeps."""

from typing import Any

from tests.matrix.__main__ import BEGIN, END, HANG, HEADER, put_rows, row


def found(python: str, torch: str, **more: Any) -> dict[str, Any]:
    """Return what the smoke set says of a pair in which all is well."""
    calls: dict[str, Any] = {"calls": 7, "wrong": [], "refused by torch": [], "problems": [], "errors": 0}
    return {
        "python": python,
        "torch": torch,
        "compiled": False,
        "no hook": None,
        "calls, native hook": calls | {"hook": "native"},
        "calls, python hook": calls | {"hook": "python"},
        "frameworks": {"steps": 16, "refused by torch": {}, "problems": []},
        "errors": {"lines": 600, "changed": []},
        "hang": HANG,
    } | more


def test_row_says_where_the_hook_came_from_and_why_there_is_none() -> None:
    other = {"calls, native hook": found("", "")["calls, python hook"]}
    assert "| of the wheel | 7 of 7 |" in row(found("3.12.1", "2.8.0+cu128"))
    assert "| compiled | 7 of 7 |" in row(found("3.12.1", "2.8.0+cu128", compiled=True))
    assert "not loaded: the Python hook took its place" in row(found("3.12.1", "2.8.0+cu128", **other))
    assert "| none: no compiler | 7 of 7 |" in row(found("3.12.1", "2.8.0", **{"no hook": "no compiler"}, **other))


def test_page_keeps_rows_of_other_pairs_and_replaces_those_of_the_same_release() -> None:
    rows = [row(found(*pair)) for pair in (("3.9.18", "2.6.0+cu124"), ("3.11.7", "2.13.0+cpu"))]
    page = "\n".join(["before", BEGIN, "", HEADER, *rows, "", END, "after", ""])
    newer = [row(found("3.11.9", "2.13.0+cu130")), row(found("3.11.7", "2.7.1+cu126"))]
    lines = put_rows(page, newer).splitlines()
    assert lines == ["before", BEGIN, "", *HEADER.splitlines(), rows[0], newer[1], newer[0], "", END, "after"]
