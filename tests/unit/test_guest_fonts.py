"""Fonts of matplotlib that are opened in memory, with a stand-in for its class."""

import io
import threading
from pathlib import Path
from types import SimpleNamespace

from guest.kernels.fonts import MAX_BYTES, Loaded, load_fonts


def font_class() -> type:
    """A class that opens its file as matplotlib's does."""

    class Font:
        def __init__(self, filename: str) -> None:
            self.file = io.open(filename, "rb")  # noqa: UP020, SIM115 - as it does

    load_fonts(SimpleNamespace(FT2Font=Font))
    return Font


def test_a_font_is_in_memory_and_knows_its_file(tmp_path: Path):
    path = tmp_path / "font.ttf"
    path.write_bytes(b"glyphs")
    file = font_class()(str(path)).file
    assert isinstance(file, Loaded)
    assert (file.read(), file.name) == (b"glyphs", str(path))


def test_a_large_font_stays_a_file_from_its_beginning(tmp_path: Path):
    path = tmp_path / "font.ttf"
    path.write_bytes(b"g" * (MAX_BYTES + 1))
    with font_class()(str(path)).file as file:
        assert not isinstance(file, Loaded)
        assert len(file.read()) == MAX_BYTES + 1


def test_fonts_that_are_opened_at_the_same_time_leave_open_as_it_was(tmp_path: Path):
    path = tmp_path / "font.ttf"
    path.write_bytes(b"glyphs")
    before, together = io.open, threading.Barrier(2)

    class Font:
        def __init__(self, filename: str) -> None:
            together.wait()  # both have replaced it
            self.file = io.open(filename, "rb")  # noqa: UP020, SIM115 - as it does
            together.wait()

    load_fonts(SimpleNamespace(FT2Font=Font))
    threads = [threading.Thread(target=Font, args=(str(path),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert io.open is before


def test_a_class_that_cannot_be_changed_stays_as_it_is():
    load_fonts(SimpleNamespace(FT2Font=int))
    assert int("7") == 7
