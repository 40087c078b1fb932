"""Shows CSV files and spreadsheets as Markdown tables."""

import csv
import io
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain

from python_calamine import CalamineError, CalamineWorkbook

from guest.web.errors import WebError
from guest.web.found import MAX_TEXT, Found

MAX_COLUMNS = 200
MAX_UNPACKED = 256 * 1024 * 1024  # bytes of all files in a spreadsheet


def read_csv(text: str, *, tabs: bool) -> Found:
    """Return comma or tab separated values as a table."""
    found = Found("table")
    csv.field_size_limit(MAX_TEXT)
    head = text.partition("\n")[0]
    delimiter = "\t" if tabs else max(",;\t|", key=head.count)
    try:
        found.text = _joined(_table(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)), found)
    except csv.Error:
        found.text = text
        found.warn("it is not proper CSV; this is its text")
    return found


def read_spreadsheet(data: bytes) -> Found:
    """Return the sheets of a workbook (xlsx, xlsm, xlsb, xls, ods) as tables."""
    found = Found("table")
    _check_unpacked(data)
    try:
        workbook = CalamineWorkbook.from_filelike(io.BytesIO(data))
        sheets = (
            chain([f"## {name}\n"], _table(workbook.get_sheet_by_name(name).iter_rows()), ["\n"])
            for name in workbook.sheet_names
        )
        found.text = _joined(chain.from_iterable(sheets), found)
    except CalamineError as error:
        raise WebError("unreadable", f"the spreadsheet cannot be read: {error}") from error
    return found


def _check_unpacked(data: bytes) -> None:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MAX_UNPACKED:
            raise WebError("too_large", "the spreadsheet is too large when unpacked", limit=MAX_UNPACKED)


def _table(rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is its head."""
    width = 0
    for row in rows:
        cells = [_cell(value) for value in row][:MAX_COLUMNS]
        if not width:
            width = len(cells)
            if not any(cells):
                width = 0
                continue
            yield _line(cells)
            yield _line(["---"] * width)
        else:
            yield _line(cells + [""] * (width - len(cells)))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(value: object) -> str:
    text = "" if value is None else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _joined(lines: Iterable[str], found: Found) -> str:
    """Join lines up to the longest text."""
    text: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if size > MAX_TEXT:
            found.warn(f"only the first {MAX_TEXT:,} characters of the tables are shown")
            break
        text.append(line)
    return "".join(text)
