"""Views are the contract with every face: serialisable, and versioned by their schema."""

import hashlib
import json

import pytest

from guest.client.messages import CodeError, Display
from guest.client.reports import CompiledReport, ProcessEnd
from mcp_sandbox import views
from mcp_sandbox.errors import MachineLost
from mcp_sandbox.views import ErrorView, ImageView, OutputPage, RunProgress, RunTimings, RunView, StreamView, View

RUN = RunView(
    sandbox_id="sb-1",
    run_id="run-1",
    kind="code",
    language="python",
    status="error",
    state="kept",
    lost_before=False,
    timed_out_after_s=None,
    stopped=False,
    exit_code=None,
    signal=None,
    error=CodeError("ValueError", "no", "Traceback …"),
    stdout=StreamView(head="a", tail="z", omitted_bytes=7, spill="/tmp/.output/1"),
    stderr=StreamView(),
    displays=(Display({"text/plain": "1"}),),
    displays_dropped=0,
    artifacts=(),
    images=(ImageView(path="/tmp/outputs/a.png", mime_type="image/png", data=b"\x89PNG"),),
    timings=RunTimings(queue_ms=0, restore_ms=1.5, run_ms=2, total_ms=4),
    report=CompiledReport("run", "g++", 1, "", "", "", ProcessEnd(0, None, 1, 1, None)),
)
# The first digits of the SHA-256 of each schema. A change here is a change of the contract: mention it in CHANGELOG.md.
SCHEMAS = {
    "ArtifactList": "52cf9e143ef0",
    "ArtifactView": "6b8be9d812aa",
    "ClosedSandbox": "c96064fe72ee",
    "CopiedFile": "3d4ee017dc88",
    "ErrorView": "b378374d834d",
    "FileList": "0eab8f93e6ce",
    "FilePart": "3bec4bb26bb9",
    "FileView": "b4a25b921a1c",
    "ForkedSandboxes": "dbdbb5aa5edb",
    "ImageView": "dbd752a2a7fc",
    "MissingModule": "8166824e4ae6",
    "OutputPage": "c03b8e1afaf9",
    "PageView": "828507f6d38a",
    "RedirectView": "cf672f9e86bf",
    "RunProgress": "02ae94c6adf7",
    "RunTimings": "4025a55faa55",
    "RunView": "ce41004d7d78",
    "SandboxList": "113993605ca7",
    "SandboxView": "499298b2db12",
    "SearchErrorView": "7ce47797477e",
    "SearchResultView": "a73ae45f1e01",
    "SearchView": "cad6e9de421f",
    "SentInput": "54913ccd30be",
    "ServedSandbox": "5e305544148d",
    "SkippedMember": "a0b01ede0d2d",
    "StreamView": "e15a54a55f81",
    "TemplateView": "1838b8823213",
    "UnpackedArchive": "ac142feb345b",
    "View": "90c9370f10a0",
    "WrittenFile": "0229e88d46ce",
}


def test_a_run_survives_serialisation_whole():
    assert RunView.model_validate_json(RUN.model_dump_json()) == RUN


def test_progress_carries_a_result_or_an_error():
    page = OutputPage(text="x", start=0, end=1, size=1)
    error = ErrorView.of(MachineLost("sb-1", "signal 9", "run-1"))
    lost = RunProgress(
        sandbox_id="sb-1", run_id="run-1", page=page, elapsed_s=1, left_s=0, live_full=False, error=error
    )
    read_back = RunProgress.model_validate_json(lost.model_dump_json())
    assert read_back.error is not None
    assert (read_back.error.code, read_back.error.fields["run_id"]) == ("machine_lost", "run-1")


@pytest.mark.parametrize(
    "name", sorted(name for name in views.__all__ if name[0].isupper() and not name.endswith("_META"))
)
def test_the_schema_of_a_view_changes_only_on_purpose(name: str):
    kind = getattr(views, name)
    assert issubclass(kind, View)
    schema = json.dumps(kind.model_json_schema(mode="serialization"), sort_keys=True)
    assert SCHEMAS.get(name) == hashlib.sha256(schema.encode()).hexdigest()[:12], f"{name} changed"
