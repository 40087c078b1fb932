"""Which templates have a Python module, by the packages that their definitions name."""

import re
from collections.abc import Mapping

from templates.model import Template

# Modules whose distribution has another name, after `normal`.
DISTRIBUTIONS: Mapping[str, str] = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "pil": "pillow",
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "vl-convert": "vl-convert-python",
    "yaml": "pyyaml",
}
_SEPARATORS = re.compile(r"[-_.]+")


def distribution_of(module: str) -> str:
    """Return the normalised name of the distribution that has a module, such as scikit-learn for sklearn.svm."""
    name = normal(module.partition(".")[0])
    return DISTRIBUTIONS.get(name, name)


def version_in(template: Template, distribution: str) -> str | None:
    """Return the version of a distribution in a template, "" if it is a Debian package, None if there is none."""
    source = template.source.debian
    if source is None or template.language != "python":
        return None
    for wheel in (*source.wheels, *(source.dependencies or ())):
        name, version = wheel.split("==")
        if normal(name.partition("[")[0]) == distribution:
            return str(version)
    packages = {package.partition("/")[0] for package in source.packages}
    return "" if f"python3-{distribution}" in packages else None


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return _SEPARATORS.sub("-", name).lower()
