"""Examples of answers for the OpenAPI document. They are real values, so they cannot contradict the schemas."""

from typing import Any

from mcp_sandbox.errors import SandboxBusy
from mcp_sandbox.rest.problems import problem_of
from mcp_sandbox.views import (
    ArtifactList,
    ArtifactView,
    ClosedSandbox,
    FileList,
    FileView,
    OutputPage,
    PageView,
    RunProgress,
    RunTimings,
    RunView,
    SandboxView,
    SearchResultView,
    SearchView,
    SkippedMember,
    StreamView,
    UnpackedArchive,
    View,
    WrittenFile,
)

BOX = "sb-435d3da67bac9299"

SANDBOX = SandboxView(
    sandbox_id=BOX,
    template="python-data-analysis",
    language="python",
    isolation_in_force="kernel (gvisor)",
    isolation="kernel",
    driver="gvisor",
    accel=None,
    host="local",
    memory_mb=1024,
    vcpus=1,
    disk_mb=1024,
    network="none",
    allow_domains=[],
    state="ready",
    run_ids=[],
    age_s=0.0,
    expires_in_s=900.0,
    ends_in_s=14400.0,
    queue_ms=0.1,
    restore_ms=0.0,
    missing_protections=[],
)
RUN = RunView(
    sandbox_id=BOX,
    run_id="run-1",
    kind="code",
    language="python",
    status="ok",
    state="kept",
    lost_before=False,
    timed_out_after_s=None,
    stopped=False,
    exit_code=None,
    signal=None,
    error=None,
    stdout=StreamView(head="42\n"),
    stderr=StreamView(),
    displays=(),
    displays_dropped=0,
    artifacts=(),
    images=(),
    timings=RunTimings(queue_ms=0.1, restore_ms=0, run_ms=4.2, total_ms=4.4),
    expires_in_s=900.0,
)
PROGRESS = RunProgress(
    sandbox_id=BOX,
    run_id="run-2",
    page=OutputPage(text="epoch 1\n", start=0, end=8, size=8),
    elapsed_s=1.5,
    left_s=598.5,
    live_full=False,
)
FIGURE = ArtifactView(path="/tmp/outputs/figure-1.png", size=23048, mime_type="image/png")  # noqa: S108 - in a sandbox
FOUND = SearchView(
    query="example domain",
    page=1,
    results=[
        SearchResultView(
            rank=1,
            title="Example Domain",
            url="https://example.org/",
            snippet="This domain is for use in documents.",
            published=None,
            engine="brave",
        )
    ],
    providers=["brave"],
    partial=False,
    errors=[],
    cached=False,
)
PAGE = PageView(
    url="https://example.org/",
    final_url="https://example.org/",
    status=200,
    redirects=[],
    kind="page",
    content_type="text/html",
    charset="utf-8",
    title="Example Domain",
    author=None,
    published=None,
    bytes=1256,
    sha256="ea8fac7c65fb589b0d53560f5251f74f9e9b243478dcb6b3ea79b5e36449c8d9",
    total_chars=36,
    start_index=0,
    next_start_index=None,
    text="This domain is for use in documents.",
    cached=False,
    saved=None,
    warnings=[],
)

EXAMPLES: dict[type[View], Any] = {
    type(example): example.model_dump(mode="json")
    for example in (
        SANDBOX,
        RUN,
        PROGRESS,
        ClosedSandbox(sandbox_id=BOX, closed=True),
        WrittenFile(path="/workspace/data.csv", size=1048576),
        FileList(
            path="/workspace",
            entries=[FileView(path="/workspace/data.csv", kind="file", size=1048576)],
            truncated=False,
        ),
        UnpackedArchive(
            path="/workspace/project",
            files=12,
            directories=3,
            size=48213,
            skipped=1,
            skipped_members=[SkippedMember(name="latest", reason="neither a file nor a directory")],
        ),
        ArtifactList(artifacts=[FIGURE], truncated=False),
        FOUND,
        PAGE,
        problem_of(SandboxBusy(BOX, "run-2", 12)),
    )
}
