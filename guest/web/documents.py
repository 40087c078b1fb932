"""Reads PDF files and JSON."""

import io
import json
import logging
from datetime import datetime

from pypdf import PdfReader
from pypdf.errors import PyPdfError

from guest.web.cleaning import one_line
from guest.web.errors import WebError
from guest.web.found import MAX_TEXT, Found

MAX_PAGES = 2000
logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def read_pdf(data: bytes) -> Found:
    """Return the text of a PDF file, page by page."""
    found = Found("pdf", text="")
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise WebError("unreadable", "the PDF is encrypted")
        _read_about(reader, found)
        found.text = _read_text(reader, found)
    except PyPdfError as error:
        raise WebError("unreadable", f"the PDF cannot be read: {error}") from error
    if not found.text.strip():
        found.warn("the PDF has no text; its pages are probably images")
    return found


def _read_text(reader: PdfReader, found: Found) -> str:
    pages: list[str] = []
    size = 0
    for number, page in enumerate(reader.pages, 1):
        try:
            text = page.extract_text()
        except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            found.warn(f"page {number} of the PDF cannot be read")
            continue
        pages.append(text)
        size += len(text)
        if size > MAX_TEXT or number >= MAX_PAGES:
            found.warn(f"only the first {number} pages of the PDF are shown")
            break
    return "\n\n".join(pages)


def _read_about(reader: PdfReader, found: Found) -> None:
    try:
        about = reader.metadata
        if about is not None:
            found.title, found.author = one_line(about.title), one_line(about.author)
            date = about.creation_date
            found.published = date.date().isoformat() if isinstance(date, datetime) else None
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError):
        found.warn("what the PDF says about itself cannot be read")


def read_json(text: str) -> Found:
    """Return JSON, indented."""
    found = Found("json", text)
    try:
        found.text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        found.warn("it is not valid JSON; this is its text")
    return found
