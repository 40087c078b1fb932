"""Finds out what a download is, and what it says. Runs without a network."""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from lxml import etree

from guest.web.cleaning import clean_text, squeeze
from guest.web.decoding import decode, decompress
from guest.web.documents import read_json, read_pdf
from guest.web.feeds import read_feed
from guest.web.found import MAX_TEXT, Found
from guest.web.pages import read_page
from guest.web.tables import read_csv, read_spreadsheet

IMAGES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
CSV_TYPES = ("text/csv", "application/csv", "text/tab-separated-values")
SHEET_TYPES = (
    "application/vnd.openxmlformats-officedocument.spreadsheetml.",
    "application/vnd.ms-excel",
    "application/vnd.oasis.opendocument.spreadsheet",
)
SHEET_NAMES = re.compile(r"\.(xlsx|xlsm|xlsb|xls|ods)$", re.IGNORECASE)
HTML_START = re.compile(rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
TYPE = re.compile(r"[a-z0-9.+-]+/[a-z0-9.+-]+")
CHARSET = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
SNIFF = 2048


@dataclass(frozen=True, slots=True)
class Download:
    """What a server sent, still compressed."""

    data: bytes
    url: str
    content_type: str = ""
    encoding: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def mime(self) -> str:
        """The type that the server claims."""
        found = TYPE.match(self.content_type.strip().lower())
        return found[0] if found else ""

    @property
    def charset(self) -> str | None:
        """The encoding that the server claims."""
        found = CHARSET.search(self.content_type)
        return found[1] if found else None


def extract(download: Download, form: str, max_bytes: int, *, keep: bool) -> tuple[dict[str, Any], bytes]:
    """Return what is known about a download, and a body: its text, then, if needed, its bytes.

    The bytes are needed if there is no text, or if the caller wants to `keep` them.
    """
    data = decompress(download.data, download.encoding, max_bytes)
    mime, found = read(data, download, form)
    text = None if found.text is None else clean_text(found.text)
    if text is not None and found.kind in ("page", "pdf", "feed") and form != "raw":
        text = squeeze(text)
    if text is not None and len(text) > MAX_TEXT:
        text = text[:MAX_TEXT]
        found.warn(f"only the first {MAX_TEXT:,} characters are shown")
    packed = b"" if text is None else text.encode("utf-8", "replace")
    kept = data if keep or text is None else b""
    header = {
        "kind": found.kind,
        "content_type": mime,
        "charset": found.charset,
        "title": found.title,
        "author": found.author,
        "published": found.published,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "text_bytes": None if text is None else len(packed),
        "warnings": [*download.warnings, *found.warnings],
    }
    return header, packed + kept


def read(data: bytes, download: Download, form: str) -> tuple[str, Found]:
    """Return the type of a download as it really is, and what was found in it."""
    mime = download.mime
    for pattern, image in IMAGES:
        if pattern.match(data):
            return image, Found("image")
    if data.startswith(b"%PDF-"):
        return "application/pdf", read_pdf(data)
    if mime.startswith(SHEET_TYPES) or (
        SHEET_NAMES.search(download.url.partition("?")[0]) and _looks_binary(data, mime)
    ):
        return mime or "application/octet-stream", read_spreadsheet(data)
    if _looks_binary(data, mime):
        return mime or "application/octet-stream", Found("binary")
    text, charset = decode(data, download.charset)
    found = _read_text(text, data, download, form)
    found.charset = charset
    if "\ufffd" in text:
        found.warn(f"some bytes are not valid {charset}")
    return mime or "text/plain", found


def _read_text(text: str, data: bytes, download: Download, form: str) -> Found:
    mime = download.mime
    is_html = mime in ("text/html", "application/xhtml+xml") or (
        mime in ("", "text/plain", "application/octet-stream") and bool(HTML_START.match(data[:SNIFF]))
    )
    if form == "raw":
        return Found("page" if is_html else "text", text)
    if is_html and text.strip():
        return read_page(text, download.url, form)
    if mime == "application/json" or mime.endswith("+json"):
        return read_json(text)
    if mime in CSV_TYPES or download.url.partition("?")[0].lower().endswith((".csv", ".tsv")):
        return read_csv(text, tabs=mime == "text/tab-separated-values" or download.url.lower().endswith(".tsv"))
    if mime.endswith(("/xml", "+xml")) or data.lstrip()[:5] == b"<?xml":
        try:
            return read_feed(data) or Found("text", text)
        except etree.LxmlError:
            pass
    return Found("text", text)


def _looks_binary(data: bytes, mime: str) -> bool:
    """Return whether bytes are no text in any usual encoding. Text may have a few strange characters."""
    start = data[:SNIFF]
    if start.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        return False
    strange = sum(byte < 0x20 and byte not in b"\t\n\r\f\x1b" for byte in start)
    if mime.startswith("text/"):
        return strange * 4 > len(start)
    return b"\0" in start or strange * 20 > len(start)
