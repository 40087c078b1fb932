"""HTML as plain text: its title, its words, and its tables with aligned columns."""

MAX_HTML = 512 * 1024  # characters read; a reader gets far less text than that
MAX_CELL = 50  # characters
MAX_COLUMNS = 100
SKIPPED = frozenset({"script", "style", "template", "button", "select", "label", "form", "svg", "iframe", "noscript"})
BREAKS = frozenset({"p", "div", "br", "li", "ul", "ol", "section", "pre", "title", "h1", "h2", "h3", "h4", "h5", "h6"})


def html_text(html: str) -> str:
    """Return what a reader of a page would see; if that is nothing, what kind of page it is."""
    from html.parser import HTMLParser  # seldom needed

    page = _Page()
    parser = HTMLParser(convert_charrefs=True)
    parser.handle_starttag = page.start  # type: ignore[method-assign]
    parser.handle_endtag = page.end  # type: ignore[method-assign]
    parser.handle_data = page.add  # type: ignore[method-assign]
    parser.feed(html[:MAX_HTML])
    parser.close()
    page.end("table")  # of a page that was cut
    lines = (line.rstrip() for line in "".join(page.parts).splitlines())
    if text := "\n".join(line for line in lines if line):
        return text if len(html) <= MAX_HTML else f"{text}\n…"
    kind = "scripts" if "<script" in html else "no text"
    return f"(HTML with {kind}, {len(html):,} characters)"


class _Page:
    """Collects the text of a page; a table is collected row by row and then aligned."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._rows: list[list[str]] | None = None  # of the table that is being read
        self._skipped = 0  # open elements that have no text for readers

    def start(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in SKIPPED
        if tag == "table":
            self._rows = []
        elif self._rows is None:
            self.parts.append("\n" if tag in BREAKS else "")
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            span = dict(attrs).get("colspan") or "1"
            self._rows[-1] += [""] * (min(int(span), MAX_COLUMNS) if span.isdecimal() else 1)

    def end(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in SKIPPED))
        if tag == "table" and self._rows is not None:
            self.parts.append(f"\n{aligned(self._rows)}\n")
            self._rows = None
        elif tag in BREAKS and self._rows is None:
            self.parts.append("\n")

    def add(self, data: str) -> None:
        words = "" if self._skipped else " ".join(data.split())
        if self._rows is None:
            self.parts.append(f"{words} " if words else "")
        elif words and self._rows and self._rows[-1]:
            cell = f"{self._rows[-1][-1]} {words}".strip()
            self._rows[-1][-1] = cell if len(cell) <= MAX_CELL else f"{cell[: MAX_CELL - 1]}…"


def aligned(rows: list[list[str]]) -> str:
    """Return a table as lines with aligned columns, as pandas prints them."""
    rows = [row[:MAX_COLUMNS] for row in rows if row]
    width = max(map(len, rows), default=0)
    columns = list(zip(*(row + [""] * (width - len(row)) for row in rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [[cell.rjust(room) for cell, room in zip(row, widths, strict=True)] for row in zip(*columns, strict=True)]
    return "\n".join("  ".join(line).rstrip() for line in lines)
