"""Pillow's images: one picture each, even if code saves an image as an artifact and then shows it."""

import os
import zlib
from functools import wraps
from typing import Any

from guest.kernels.libraries import ADAPTERS, AfterImport
from guest.places import OUTPUTS

SHOWN = (".png", ".jpg", ".jpeg", ".webp", ".gif")  # what a reader of the result sees


class Pictures:
    """Remembers what a cell has saved."""

    def __init__(self) -> None:
        self._saved: set[tuple[int, int]] = set()  # object and checksum: code may go on drawing

    def forms(self, image: Any) -> dict[str, Any]:  # noqa: ANN401 - a PIL Image
        """Return an image as PNG, if it has one and is not saved as an artifact."""
        forms: dict[str, Any] = {"text/plain": f"{repr(image).partition(' at 0x')[0]}>"}
        if self._saved and checksum(image) in self._saved:
            return forms
        png = image._repr_png_()
        return forms if png is None else {**forms, "image/png": png}

    def adapt(self, module: Any) -> None:  # noqa: ANN401 - PIL.Image
        """Notice the images that are saved as artifacts: these are shown."""
        save = module.Image.save

        @wraps(save)
        def save_image(image: Any, fp: Any, format: Any = None, **options: Any) -> None:  # noqa: A002, ANN401 - as in Pillow
            save(image, fp, format, **options)
            if is_shown(fp, format):
                self._saved.add(checksum(image))

        module.Image.save = save_image

    def end_cell(self) -> None:
        """Forget what the cell has saved: the next one shows it again."""
        self._saved.clear()


def checksum(image: Any) -> tuple[int, int]:  # noqa: ANN401 - a PIL Image
    """Return what tells an image from others, and from itself before a change."""
    return id(image), zlib.crc32(image.tobytes())


def is_shown(target: object, kind: object) -> bool:
    """Return whether a file that was saved is a picture among the artifacts."""
    if not isinstance(target, (str, os.PathLike)):
        return False
    path = os.path.abspath(os.fspath(target))  # noqa: PTH100 - pathlib is slow to load
    named = (f".{kind}" if kind else os.path.splitext(path)[1] or ".png").lower()  # noqa: PTH122 - the same
    return path.startswith(f"{OUTPUTS}/") and named in SHOWN


def install(imports: AfterImport) -> Pictures:
    """Adapt Pillow when it is imported."""
    pictures = Pictures()
    imports.calls["PIL.Image"] = pictures.adapt
    ADAPTERS["PIL.Image", "Image"] = pictures.forms
    return pictures
