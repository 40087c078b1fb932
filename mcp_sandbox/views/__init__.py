"""Results as data: one serialisable model of everything a caller can get. Faces render it; none adds facts to it."""

from mcp_sandbox.views.base import View
from mcp_sandbox.views.errors import ErrorView, steps_for, with_next_step
from mcp_sandbox.views.files import (
    FILE_META,
    ArtifactList,
    ArtifactView,
    CopiedFile,
    FileList,
    FilePart,
    FileView,
    SkippedMember,
    UnpackedArchive,
    WrittenFile,
    file_uri,
    mime_of,
)
from mcp_sandbox.views.listing import first_page
from mcp_sandbox.views.pages import PAGE_META, PageView, RedirectView
from mcp_sandbox.views.runs import (
    RUN_META,
    ImageView,
    MissingModule,
    OutputPage,
    RunProgress,
    RunTimings,
    RunView,
    SentInput,
    StreamView,
)
from mcp_sandbox.views.sandboxes import ClosedSandbox, ForkedSandboxes, SandboxList, SandboxView, ServedSandbox
from mcp_sandbox.views.searches import SEARCH_META, SearchErrorView, SearchResultView, SearchView
from mcp_sandbox.views.templates import TemplateView

__all__ = [
    "FILE_META",
    "PAGE_META",
    "RUN_META",
    "SEARCH_META",
    "ArtifactList",
    "ArtifactView",
    "ClosedSandbox",
    "CopiedFile",
    "ErrorView",
    "FileList",
    "FilePart",
    "FileView",
    "ForkedSandboxes",
    "ImageView",
    "MissingModule",
    "OutputPage",
    "PageView",
    "RedirectView",
    "RunProgress",
    "RunTimings",
    "RunView",
    "SandboxList",
    "SandboxView",
    "SearchErrorView",
    "SearchResultView",
    "SearchView",
    "SentInput",
    "ServedSandbox",
    "SkippedMember",
    "StreamView",
    "TemplateView",
    "UnpackedArchive",
    "View",
    "WrittenFile",
    "file_uri",
    "first_page",
    "mime_of",
    "steps_for",
    "with_next_step",
]
