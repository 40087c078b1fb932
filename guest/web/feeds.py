"""Shows RSS and Atom feeds as a list of their entries."""

from typing import Any

from lxml import etree
from lxml import html as lxml_html

from guest.web.cleaning import one_line, remove_hidden
from guest.web.found import Found

ROOTS = ("rss", "feed", "rdf")
ENTRIES = ("item", "entry")
DATES = ("pubdate", "published", "updated", "date")
SUMMARIES = ("description", "summary", "content", "encoded")
MAX_ENTRIES = 500
SUMMARY = 1000  # characters


def read_feed(data: bytes) -> Found | None:
    """Return the entries of a feed, or None if this XML is something else."""
    parser = etree.XMLParser(resolve_entities=False, no_network=True, recover=True, huge_tree=False, load_dtd=False)
    root = etree.fromstring(data, parser)
    if root is None or _name(root) not in ROOTS:
        return None
    found = Found("feed")
    channel = next((child for child in root if _name(child) == "channel"), root)
    found.title = _field(channel, "title")
    entries = [element for element in root.iter() if _name(element) in ENTRIES]
    if len(entries) > MAX_ENTRIES:
        found.warn(f"only the first {MAX_ENTRIES} of {len(entries)} entries are shown")
    lines = [f"# {found.title or 'Feed'}", *map(_entry, entries[:MAX_ENTRIES])]
    found.text = "\n\n".join(lines)
    return found


def _entry(entry: Any) -> str:  # noqa: ANN401 - lxml has no types
    title, link, date = _field(entry, "title") or "(untitled)", _link(entry), _field(entry, *DATES)
    head = f"- [{title}]({link})" if link else f"- {title}"
    summary = _summary(entry)
    return "\n".join(filter(None, [f"{head} ({date})" if date else head, f"  {summary}" if summary else None]))


def _field(element: Any, *names: str) -> str | None:  # noqa: ANN401
    for name in names:
        for child in element:
            if _name(child) == name and (text := one_line("".join(child.itertext()), SUMMARY)):
                return text
    return None


def _link(entry: Any) -> str | None:  # noqa: ANN401
    links = [child for child in entry if _name(child) == "link"]
    for link in sorted(links, key=lambda link: link.get("rel", "alternate") != "alternate"):
        if address := one_line(link.get("href") or link.text, 2000):
            return address
    return None


def _summary(entry: Any) -> str | None:  # noqa: ANN401
    markup = _field(entry, *SUMMARIES)
    if markup is None:
        return None
    try:
        tree = lxml_html.fragment_fromstring(markup, create_parent="div")
    except etree.ParserError:
        return None
    remove_hidden(tree)
    return one_line(tree.text_content(), SUMMARY)


def _name(element: Any) -> str:  # noqa: ANN401
    tag = element.tag
    return etree.QName(tag).localname.lower() if isinstance(tag, str) else ""
