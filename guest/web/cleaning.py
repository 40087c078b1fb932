"""Removes from pages what their readers would not see, and so could not know that a model reads it."""

import re
import unicodedata
from typing import Any

from lxml import etree
from lxml.cssselect import CSSSelector

# Not shown by a browser, or only with scripts.
UNSEEN = (
    *("script", "style", "template", "noscript", "iframe", "object", "embed", "applet", "canvas", "svg"),
    *("audio", "video", "dialog", "datalist", "head"),
)
END = r"(?=;|$|!)"  # of a value
ZERO = r"(?:0+|0*\.0\d*)"  # or so little that nobody sees it
NARROW = rf"(?:max-)?(?:width|height):[01](?:px)?{END}"
HIDING = re.compile(  # whole declarations: background-color is not color, and 0.9 is not 0
    r"(?:^|;)(?:display:none|visibility:(?:hidden|collapse)|content-visibility:hidden"
    rf"|opacity:{ZERO}%?{END}|font-size:{ZERO}[a-z%]*{END}"
    rf"|{NARROW}.*;overflow:hidden|overflow:hidden.*;{NARROW}"
    r"|(?:(?:margin-)?(?:left|top)|right|bottom|text-indent):-\d{3,}"
    rf"|(?:-webkit-)?transform:[^;]*scale[xy]?\({ZERO}[,)]"
    rf"|clip:rect\((?:[01](?:px)?,?){{4}}\)|clip-path:inset\((?:50|100)%|color:transparent{END})"
)
AT_RULE = re.compile(r"@[^{};]+\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")  # such as what holds for printers only
RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
SPACE = re.compile(r"\s+")
LINK = re.compile(r"\s*(?:https?:|mailto:|tel:|[^:]*(?:[/?#]|$))", re.IGNORECASE)  # not javascript: and the like
MAX_RULES = 2000
WHOLE = ("html", "body", "main", "article")  # hidden until a script shows them
INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")
SELECTORS = ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF))  # variation selectors: 256 values that carry data unseen
BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*){2,}")


def remove_hidden(tree: Any) -> None:  # noqa: ANN401 - lxml has no types
    """Remove scripts, comments and hidden elements from a page."""
    hidden = [*_hidden_by_style(tree), *tree.iter(*UNSEEN, etree.Comment, etree.ProcessingInstruction)]
    hidden += [element for element in tree.iter(etree.Element) if _is_hidden(element)]
    for element in hidden:
        if element.getparent() is not None and element.tag not in WHOLE:
            element.drop_tree()
    for link in tree.iter("a", "area"):
        if not LINK.match(link.get("href") or ""):
            link.attrib.pop("href", None)


def clean_text(text: str) -> str:
    """Return text without control and invisible characters, with plain line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n").replace("\u2029", "\n")
    return text.translate({ord(character): None for character in set(text) if _is_invisible(character)})


def squeeze(text: str) -> str:
    """Return text with at most one blank line in a row."""
    return BLANK_LINES.sub("\n\n", text).strip()


def one_line(text: object, limit: int = 300) -> str | None:
    """Return the text of a title or the like: clean, short and in one line; None if nothing is left."""
    found = " ".join(clean_text(str(text)).split())[:limit] if text else ""
    return found or None


def _is_invisible(character: str) -> bool:
    if character in "\n\t":
        return False
    number = ord(character)
    return (
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co")
        or character in INVISIBLE
        or any(first <= number <= last for first, last in SELECTORS)
    )


def _is_hidden(element: Any) -> bool:  # noqa: ANN401
    get = element.get
    if get("hidden") is not None or (get("aria-hidden") or "").strip().lower() == "true":
        return True
    if element.tag == "input" and get("type") == "hidden":
        return True
    return _hides(get("style") or "")


def _hides(style: str) -> bool:
    return HIDING.search(SPACE.sub("", style.lower())) is not None


def _hidden_by_style(tree: Any) -> list[Any]:  # noqa: ANN401
    """Return the elements that the page's own style sheets hide."""
    found: list[Any] = []
    for sheet in tree.iter("style"):
        rules = RULE.findall(AT_RULE.sub("", COMMENT.sub("", sheet.text or "")))
        for selectors, style in rules[:MAX_RULES]:
            if _hides(style):
                found += _selected(tree, selectors)
    return found


def _selected(tree: Any, selectors: str) -> list[Any]:  # noqa: ANN401
    try:
        return list(CSSSelector(selectors.strip(), translator="html")(tree))
    except Exception:  # a selector that is wrong or unknown hides nothing that we know of
        return []
