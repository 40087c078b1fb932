"""What is in a download: its kind, its text, and nothing that a reader would not see."""

import gzip
import io
import json
import zipfile
import zlib

import brotli
import pytest
import trafilatura
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from guest.web.cleaning import clean_text
from guest.web.errors import WebError
from guest.web.extract import Download, extract
from guest.web.found import MAX_WARNINGS, Found

MIB = 1024 * 1024
LONG = "The quick brown fox jumps over the lazy dog while it rains. " * 8


def read(data: bytes, mime: str = "text/html", form: str = "markdown", *, url: str = "http://site.example/page") -> str:
    header, body = extract(Download(data, url, mime), form, 10 * MIB, keep=False)
    assert header["text_bytes"] is not None, header
    return body[: header["text_bytes"]].decode()


def facts(data: bytes, mime: str, *, url: str = "http://site.example/page", encoding: str = "") -> dict[str, object]:
    return extract(Download(data, url, mime, encoding), "markdown", 10 * MIB, keep=False)[0]


def page(body: str, head: str = "") -> bytes:
    return f"<html><head>{head}</head><body><article><p>{LONG}</p>{body}</article></body></html>".encode()


def test_a_page_is_its_main_content_with_title_and_date():
    head = '<title>Foxes</title><meta property="article:published_time" content="2024-03-05T10:00:00Z">'
    html = page('<h2>More</h2><p>Read <a href="/next">the next one</a>.</p>', head).replace(
        b"<body>", b"<body><nav><a href='/'>Home</a> <a href='/about'>About us</a></nav>"
    )
    text = read(html)
    assert "## More" in text
    assert "[the next one](http://site.example/next)" in text
    assert "About us" not in text
    about = facts(html, "text/html")
    assert (about["kind"], about["title"], about["published"]) == ("page", "Foxes", "2024-03-05")


@pytest.mark.parametrize("form", ["markdown", "text", "html"])
@pytest.mark.parametrize(
    "hidden",
    [
        "<script>SECRET</script>",
        "<style>.SECRET{}</style>",
        "<!-- SECRET -->",
        "<template><p>SECRET</p></template>",
        "<noscript>SECRET</noscript>",
        "<p hidden>SECRET</p>",
        "<p aria-hidden='true'>SECRET</p>",
        "<p style='display: none'>SECRET</p>",
        "<p style='VISIBILITY:hidden'>SECRET</p>",
        "<p style='opacity:0'>SECRET</p>",
        "<p style='opacity: 0.0 ;color:red'>SECRET</p>",
        "<p style='font-size:0px'>SECRET</p>",
        "<p style='position:absolute; left:-9999px'>SECRET</p>",
        "<p style='height:0;overflow:hidden'>SECRET</p>",
        "<p style='color:transparent'>SECRET</p>",
        "<p style='margin:0; color: transparent !important'>SECRET</p>",
        "<p style='clip-path: inset(100%)'>SECRET</p>",
        "<p style='clip: rect(0 0 0 0)'>SECRET</p>",
        "<p style='font-size:0.01em'>SECRET</p>",
        "<p style='transform: translateX(1px) scale(0)'>SECRET</p>",
        "<div style='display:none'><div><p>SECRET</p></div></div>",
        "<p class='unseen'>SECRET</p>",
        "<p id='gone'>SECRET</p>",
        "<input type='hidden' value='SECRET'>",
        "<svg><text>SECRET</text></svg>",
        "<iframe srcdoc='<p>SECRET</p>'></iframe>",
        "<a href='javascript:SECRET'>link</a>",
        "<img src='x' onerror='SECRET'>",
    ],
)
def test_what_a_reader_does_not_see_is_not_in_the_text(hidden: str, form: str):
    style = "<style>p.unseen { display : none } /* x */ #gone,.other{font-size:0} @media print{p{display:none}}</style>"
    text = read(page(f"{hidden}<p>{LONG}</p>", style), form=form)
    assert "quick brown fox" in text
    assert "SECRET" not in text


@pytest.mark.parametrize(
    "style",
    [
        "background-color: transparent",
        "margin: 0; -webkit-tap-highlight-color: transparent",
        "font-size: 0.9em",
        "font-size: 0.875rem; color: red",
        "transform: scale(0.98)",
        "opacity: 0.9",
        "padding-left: 100px",
        "scroll-margin-top: -100px",
        "width: 10px; overflow: hidden",
        "clip: rect(0, auto, auto, 0)",
    ],
)
def test_visible_text_stays(style: str):
    assert "SEEN" in read(page(f"<p style='{style}'>SEEN, because {LONG}</p>"))
    assert "SEEN" in read(page(f"<p class='part'>SEEN, because {LONG}</p>", f"<style>.part {{ {style} }}</style>"))


@pytest.mark.parametrize(
    "character",
    [*"\u200b\u200c\u200d\u2060\ufeff\u00ad\u202e\u2066\u0000\u0007\u001b\u009b\ufe0f\u3164\u180e", "\U000e0041"],
)
def test_invisible_and_control_characters_do_not_survive(character: str):
    assert clean_text(f"a{character}b") == "ab"
    assert character not in read(page(f"<p>before{character}after</p>"))
    assert character not in read(f"plain{character}text".encode(), "text/plain", "raw")


def test_lines_and_letters_of_all_scripts_survive():
    text = "line\n\ttab é ü ß 日本語 العربية हिन्दी 🙂"
    assert clean_text(text.replace("\n", "\r\n")) == text


def test_a_page_without_main_content_is_shown_whole_with_a_warning():
    html = b"<html><body>" + b"".join(b"<div><span>item %d</span></div>" % n for n in range(60)) + b"</body></html>"
    header, body = extract(Download(html, "http://site.example/", "text/html"), "text", MIB, keep=False)
    assert b"item 59" in body
    assert header["warnings"] or b"item 0" in body


def test_the_text_of_a_huge_page_is_shown_whole_without_a_search_for_its_main_content(monkeypatch: pytest.MonkeyPatch):
    """To search 60,000 elements took a minute of CPU time."""
    monkeypatch.setattr(trafilatura, "extract", lambda *_args, **_fields: pytest.fail("it was searched"))
    html = page("<div><p>some <b>bold</b> text</p></div>" * 7000, "<title>Foxes</title>")
    header, body = extract(Download(html, "http://site.example/", "text/html"), "markdown", MIB, keep=False)
    assert header["title"] == "Foxes"
    assert header["warnings"] == ["the page is too large to find its main content; this is all of its text"]
    assert body.startswith(LONG[:50].encode())
    assert body.count(b"bold") == 7000


def test_raw_is_the_source():
    assert read(b"<html><body><b>bold</b></body></html>", form="raw") == "<html><body><b>bold</b></body></html>"


@pytest.mark.parametrize(
    ("encoded", "mime"),
    [
        ("Grüße aus Köln".encode("latin-1"), "text/plain; charset=iso-8859-1"),
        ("Grüße aus Köln".encode("cp1252"), 'text/plain; charset="windows-1252"'),
        ("Grüße aus Köln".encode("utf-16"), "text/plain"),
        ("Grüße aus Köln".encode("utf-8-sig"), "text/plain; charset=latin-1"),
        ("Grüße aus Köln".encode(), "text/plain; charset=no-such-charset"),
        ("Grüße aus Köln".encode(), "text/plain; charset=utf-7"),
        ("Grüße aus Köln".encode(), "text/plain; charset=punycode"),
        ("Grüße aus Köln".encode(), "text/plain; charset=zip"),
    ],
)
def test_text_is_read_in_the_encoding_that_it_has(encoded: bytes, mime: str):
    assert read(encoded, mime) == "Grüße aus Köln"


def test_the_encoding_of_a_page_is_found_in_the_page_or_guessed():
    russian = "Привет, мир. Это страница про погоду и природу. " * 20
    html = f'<html><head><meta charset="koi8-r"></head><body><p>{russian}</p></body></html>'
    assert "Привет, мир" in read(html.encode("koi8-r"))
    assert "Привет, мир" in read(russian.encode("cp1251"), "text/plain")


def test_bytes_that_are_no_text_in_their_encoding_are_a_warning():
    header = facts(b"abc \x81\x8d\x90 def", "text/plain; charset=ascii")
    assert header["warnings"] or header["charset"] not in ("ascii", "utf-8")


def test_json_is_indented():
    assert read(b'{"a":[1,2],"b":"\\u00e9"}', "application/json") == '{\n  "a": [\n    1,\n    2\n  ],\n  "b": "é"\n}'
    assert json.loads(read(b'{"a":1}', "application/ld+json; charset=utf-8")) == {"a": 1}


@pytest.mark.parametrize("broken", [b"{", b"[" * 100_000, b"1" * 100_000])
def test_broken_json_is_shown_as_text(broken: bytes):
    assert read(broken, "application/json") == broken.decode()


def test_csv_is_a_table():
    assert read("Name;Größe\nA|B;1,5\n\nC".encode(), "text/csv") == (
        "| Name | Größe |\n| --- | --- |\n| A\\|B | 1,5 |\n|  |  |\n| C |  |\n"
    )
    assert read(b"a\tb\n1\t2", "text/tab-separated-values") == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert read(b"a,b\n1,2", "text/plain", url="http://site.example/x.csv?y=1").startswith("| a | b |")


def workbook(sheet: str = "") -> bytes:
    """Return a small spreadsheet."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    rows = sheet or (
        '<row r="1"><c r="A1" t="inlineStr"><is><t>year</t></is></c>'
        '<c r="B1" t="inlineStr"><is><t>sum</t></is></c></row>'
        '<row r="2"><c r="A2"><v>2024</v></c><c r="B2"><v>1.5</v></c></row>'
    )
    files = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="xml" '
        'ContentType="application/xml"/><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet name="Budget" sheetId="1" '
        'r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{rows}</sheetData></worksheet>',
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"


def test_the_sheets_of_a_spreadsheet_are_tables():
    assert read(workbook(), XLSX).strip() == "## Budget\n| year | sum |\n| --- | --- |\n| 2024 | 1.5 |"
    assert "2024" in read(workbook(), "application/octet-stream", url="http://site.example/budget.xlsx")


def test_a_spreadsheet_that_is_a_zip_bomb_is_refused():
    with pytest.raises(WebError) as refused:
        facts(workbook(" " * (300 * MIB)), XLSX)
    assert refused.value.code == "too_large"


def pdf(*lines: str) -> bytes:
    """Return a PDF file with a page for each line."""
    writer = PdfWriter()
    for line in lines:
        sheet = writer.add_blank_page(300, 300)
        font = DictionaryObject(
            {NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1")}
        )
        font[NameObject("/BaseFont")] = NameObject("/Helvetica")
        fonts = DictionaryObject({NameObject("/F1"): font})
        sheet[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 200 Td ({line}) Tj ET".encode())
        sheet[NameObject("/Contents")] = writer._add_object(content)
    writer.add_metadata({"/Title": "A report", "/CreationDate": "D:20240305100000Z"})
    packed = io.BytesIO()
    writer.write(packed)
    return packed.getvalue()


def test_a_pdf_is_the_text_of_its_pages_whatever_type_the_server_claims():
    data = pdf("The first page", "The second page")
    assert read(data, "application/octet-stream") == "The first page\n\nThe second page"
    about = facts(data, "text/html")
    assert [about[name] for name in ("kind", "content_type", "title", "published")] == [
        *("pdf", "application/pdf", "A report", "2024-03-05")
    ]


def test_a_broken_pdf_is_an_error():
    with pytest.raises(WebError) as failed:
        facts(b"%PDF-1.7 broken", "application/pdf")
    assert failed.value.code == "unreadable"


RSS = """<?xml version="1.0"?><rss version="2.0"><channel><title>News</title>
<item><title>One</title><link>http://site.example/1</link><pubDate>Tue, 05 Mar 2024 10:00:00 GMT</pubDate>
<description>&lt;p&gt;Hello &lt;b&gt;you&lt;/b&gt;&lt;/p&gt;&lt;p hidden&gt;SECRET&lt;/p&gt;</description>
</item></channel></rss>"""
ATOM = """<?xml version="1.0"?><feed xmlns="http://www.w3.org/2005/Atom"><title>News</title><entry><title>One</title>
<link rel="self" href="http://site.example/self"/><link href="http://site.example/1"/><updated>2024-03-05</updated>
<summary>Hello</summary></entry></feed>"""


@pytest.mark.parametrize(("feed", "mime"), [(RSS, "application/rss+xml"), (ATOM, "application/atom+xml")])
def test_a_feed_is_a_list_of_its_entries(feed: str, mime: str):
    text = read(feed.encode(), mime)
    assert text.startswith("# News\n\n- [One](http://site.example/1) (")
    assert "Hello" in text
    assert "SECRET" not in text


def test_entities_of_a_feed_are_not_expanded():
    bomb = '<!DOCTYPE rss [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    text = read(RSS.replace("<rss", bomb + "<rss", 1).replace("One", "&b;").encode(), "application/rss+xml")
    assert "aaaaaaaaaa" not in text


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "image/png"),
        (b"\xff\xd8\xff\xe0" + bytes(20), "image/jpeg"),
        (b"GIF89a" + bytes(20), "image/gif"),
    ],
)
def test_an_image_is_its_bytes(data: bytes, mime: str):
    header, body = extract(Download(data, "http://site.example/", "text/html"), "markdown", MIB, keep=False)
    assert (header["kind"], header["content_type"], header["text_bytes"], body) == ("image", mime, None, data)


def test_other_binary_files_are_their_bytes():
    data = b"PK\x03\x04" + bytes(range(256)) * 4
    header, body = extract(Download(data, "http://site.example/a.zip", "application/zip"), "text", MIB, keep=False)
    assert (header["kind"], header["text_bytes"], body) == ("binary", None, data)


def test_the_bytes_of_a_page_follow_its_text_if_they_are_wanted():
    data = b"\xef\xbb\xbfhello"
    header, body = extract(Download(data, "http://site.example/", "text/plain"), "text", MIB, keep=True)
    assert body == b"hello" + data
    assert header["bytes"] == len(data)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),
        ("br", brotli.compress),
        ("br, gzip", lambda data: gzip.compress(brotli.compress(data))),
        ("gzip", lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:])),
        ("identity", bytes),
    ],
)
def test_compression_is_undone(encoding: str, compress):
    packed = compress(b"hello, " * 200_000)
    _header, body = extract(
        Download(packed, "http://site.example/", "text/plain", encoding), "text", 2 * MIB, keep=False
    )
    assert body == b"hello, " * 200_000


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("br", brotli.compress)])
def test_a_compression_bomb_is_refused(encoding: str, compress):
    with pytest.raises(WebError) as refused:
        facts(compress(bytes(200 * MIB)), "text/plain", encoding=encoding)
    assert refused.value.code == "too_large"


@pytest.mark.parametrize("encoding", ["zstd", "gzip, gzip, gzip, gzip", "br"])
def test_broken_or_unknown_compression_is_an_error(encoding: str):
    with pytest.raises(WebError) as failed:
        facts(b"\x00not compressed", "text/plain", encoding=encoding)
    assert failed.value.code == "bad_response"


def test_many_warnings_are_cut_off():
    found = Found("pdf", text="")
    for number in range(1000):
        found.warn(f"page {number} of the PDF cannot be read")
    assert len(found.warnings) == MAX_WARNINGS + 1
    assert found.warnings[-1] == "there are more warnings"
