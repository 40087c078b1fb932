"""Text from the web, made safe to show: one line of limited length, without characters that a reader cannot see."""

import unicodedata

ELLIPSIS = "…"
# Categories of characters: control, format (zero-width, writing direction, tags), private use, surrogate, unassigned.
INVISIBLE = frozenset({"Cc", "Cf", "Co", "Cs", "Cn"})
# Marks that choose the form of the character before them. A chain of them can carry hidden text.
VARIATION_SELECTORS = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0), range(0x180B, 0x1810))
LINE_ENDS = frozenset("\u2028\u2029")
BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and symbols that look like a space


def one_line(text: str, limit: int) -> str:
    """Return a text as one line without invisible characters, cut off after `limit` characters."""
    # Text of many invisible characters must cost no more than a long one that is shown.
    seen = "".join(map(_visible, text[: 4 * limit]))
    line = " ".join(seen.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + ELLIPSIS


def plain_text(text: str) -> str:
    """Return text of many lines without characters that would steer a terminal or hide words."""
    hidden = {ord(char): None for char in set(text) if char not in "\n\t" and (_is_hidden(char) or char in LINE_ENDS)}
    return text.translate(hidden)


def is_visible(text: str) -> bool:
    """Return whether a text has no invisible characters and no white space."""
    return all(_visible(char) == char and not char.isspace() for char in text)


def _visible(char: str) -> str:
    if char.isspace() or char in BLANK:
        return " "
    return "" if _is_hidden(char) else char


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in INVISIBLE or any(ord(char) in chars for chars in VARIATION_SELECTORS)
