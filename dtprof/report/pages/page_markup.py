"""HTML built from elements: every string is text and is escaped, unless it is already `Markup`."""

import html


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


_VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})


def element(tag: str, *children: str, **attributes: str | None) -> Markup:
    """Return one element; an attribute `class_` or `aria_label` loses or changes its underscore, None is left out."""
    inside = tag
    for name, value in attributes.items():
        if value is not None:
            inside += f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
    return Markup(f"<{inside}>" if tag in _VOID else f"<{inside}>{join(*children)}</{tag}>")


def join(*children: str) -> Markup:
    """Return elements and texts one after the other."""
    return Markup("".join([child if isinstance(child, Markup) else html.escape(child) for child in children]))
