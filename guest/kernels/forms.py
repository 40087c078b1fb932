"""Decides what becomes of the forms of a displayed value: text for a model, what travels with it, and what is a file.

A value has forms by MIME type. One picture is enough, so of several only the best becomes a file. Text in other formats
travels with the value if it is short. It becomes a file if it is too long. HTML also does if it is a whole page, or if
the plain form says nothing but the object's type: then text that a reader can use replaces the plain form.
"""

import base64
import re
from typing import Any, NamedTuple

from guest.forms import CHART, HTML, PDF, PICTURES, PLAIN, SVG, TEXTS
from guest.kernels.charts import chart_of, describe
from guest.kernels.html_text import html_text
from guest.protocol import encode_json

ALWAYS_FILES = (SVG,)  # pictures, even if models cannot see them
WORTHLESS = ("application/vnd.bokehjs_load.v0+json",)  # `output_notebook()` shows nothing but a logo
MAX_TEXT = 64 * 1024  # characters of one form of one value

# What `repr` gives for a type without one of its own: <a.b.C object at 0x7f00> and the like.
LABEL = re.compile(r"<[\w.]+(?:\[[^\]\n]*\])?(?: object)?(?: at 0x[0-9a-f]+)?>")


class Prepared(NamedTuple):
    """A value that is ready to be shown."""

    forms: dict[str, str]  # sent, by MIME type
    files: dict[str, bytes]  # saved, by extension


def prepare(data: dict[str, Any]) -> Prepared:
    """Return what to send of a value and what to save."""
    if any(mime in data for mime in WORTHLESS):
        return Prepared({}, {})
    facts = data.get(CHART) or chart_of(data)
    plain = data.get(PLAIN)
    labelled = facts is not None or plain is None or LABEL.fullmatch(str(plain)) is not None
    forms: dict[str, str] = {}
    files = pictures(data)
    drawn = bool(files)
    for mime in filter(data.__contains__, TEXTS):
        text = as_text(data[mime])
        if len(text) <= MAX_TEXT:
            forms[mime] = text
        better = mime == HTML and not drawn and (labelled or is_page(text))
        if mime not in forms or mime in ALWAYS_FILES or better:
            files[TEXTS[mime]] = as_page(text) if mime == HTML else text.encode("utf-8", "replace")
    if facts is not None:
        forms[PLAIN], forms[CHART] = describe(facts), encode_json(facts).decode()
    elif not labelled:
        forms[PLAIN] = shortened(as_text(plain))
    elif HTML in data and not drawn:
        forms[PLAIN] = html_text(as_text(data[HTML]))
    elif not files and not forms and plain is not None:
        forms[PLAIN] = as_text(plain)
    return Prepared(forms, files)


def pictures(data: dict[str, Any]) -> dict[str, bytes]:
    """Return the best picture of a value and its PDF, by extension."""
    found = [mime for mime in PICTURES if mime in data][:1] + [PDF] * (PDF in data)
    return {PICTURES.get(mime, "pdf"): as_bytes(data[mime]) for mime in found}


def as_bytes(value: object) -> bytes:
    """Return the bytes of a binary form, which IPython gives as they are or as base64."""
    return value if isinstance(value, bytes) else base64.b64decode(str(value))


def as_text(value: object) -> str:
    """Return a form as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value
    try:
        return encode_json(value).decode()
    except (TypeError, ValueError):  # code can give anything, and NaN is no JSON
        return str(value)


def as_page(html: str) -> bytes:
    """Return HTML as a file that browsers show right: a fragment does not say how it is encoded."""
    page = html if is_page(html) else f'<!doctype html>\n<meta charset="utf-8">\n{html}'
    return page.encode("utf-8", "replace")


def is_page(html: str) -> bool:
    """Return whether HTML is a whole page, not a fragment."""
    return "<html" in html[:1000].lower()


def shortened(text: str) -> str:
    """Return plain text, cut with a note if it is too long to send."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[… {len(text) - MAX_TEXT} characters left out; print or save the value …]"
