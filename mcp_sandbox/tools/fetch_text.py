"""A page from the web as a model can take it in."""

from collections.abc import Iterable, Iterator

from mcp_types import ContentBlock

from mcp_sandbox.sandboxes.file_access import image_mime
from mcp_sandbox.tools.content import call, image_block, link_block, text_block
from mcp_sandbox.tools.untrusted import untrusted
from mcp_sandbox.views import ImageView, PageView


def page_blocks(view: PageView, data: bytes, *, image_bytes: int) -> list[ContentBlock]:
    """Return a page as text, with an image if it is one of at most `image_bytes`, or a link to what is not shown."""
    mime = image_mime(data) if view.kind == "image" and len(data) <= image_bytes else None
    text = text_block(page_text(view, shown=mime is not None))
    if mime is not None:
        return [text, image_block(ImageView(path=view.url, mime_type=mime, data=data))]
    return [text] if view.artifact is None else [text, link_block(view.artifact)]


def page_text(view: PageView, *, shown: bool) -> str:
    """Return what a page says between marks, and around them what this server says about it."""
    head = f"Status {view.status}, {view.bytes:,} bytes, sha256 {view.sha256}"
    found = "\n".join(_about(view)) + ("" if view.text is None else f"\n\n{view.text}")
    return "\n".join([head, untrusted(found, view.url), *_remarks(view, shown=shown)])


def _about(view: PageView) -> Iterator[str]:
    """Yield what the page, or its server, says about itself."""
    facts = (
        ("Type", view.content_type),
        ("Title", view.title),
        ("Author", view.author),
        ("Published", view.published),
        ("Address", view.final_url),
        ("Redirects", " → ".join(f"{each.status} {each.url}" for each in view.redirects)),
        ("Warning", "; ".join(view.warnings)),
    )
    return (f"{name}: {value}" for name, value in facts if value)


def _remarks(view: PageView, *, shown: bool) -> Iterable[str]:
    if view.saved is not None:
        yield f"The whole download is in the sandbox: {view.saved.path} ({view.saved.size:,} bytes)."
    elif view.text is None and not shown:
        what = "an image that is too large to show" if view.kind == "image" else "binary"
        kept = "" if view.artifact is None else f"Read {view.artifact.uri} with resources/read, or give"
        yield f"The content is {what}. {kept or 'Give'} sandbox_id to save it as a file in a sandbox."
    if view.total_chars is not None and view.start_index >= view.total_chars > 0:
        yield f"start_index {view.start_index:,} is past the end: the text has {view.total_chars:,} characters."
    elif view.next_start_index is not None:
        more = call("fetch_url", url=view.url, start_index=view.next_start_index)
        part = f"Characters {view.start_index:,} to {view.next_start_index:,} of {view.total_chars:,}."
        whole = "" if view.artifact is None else f" The whole text: {view.artifact.uri}, with resources/read."
        yield f"{part} To read on: {more} and the same format.{whole}"
    elif view.total_chars == 0:
        yield "The page has no text."
