"""What was found in a download."""

from dataclasses import dataclass, field

MAX_TEXT = 5_000_000  # characters of one page
MAX_WARNINGS = 20


@dataclass(slots=True)
class Found:
    """The text of a download, and what it says about itself."""

    kind: str  # page, text, json, table, pdf, feed, image or binary
    text: str | None = None  # None: it has no text
    charset: str | None = None
    title: str | None = None
    author: str | None = None
    published: str | None = None
    warnings: list[str] = field(default_factory=list)

    def warn(self, warning: str) -> None:
        """Add a warning, once; after many, only say that there are more."""
        if warning not in self.warnings and len(self.warnings) <= MAX_WARNINGS:
            self.warnings.append(warning if len(self.warnings) < MAX_WARNINGS else "there are more warnings")
