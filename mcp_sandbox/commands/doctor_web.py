"""The doctor's look at web search: which providers are set up and, if asked, which of them answer."""

import anyio

from guest.errors import first_error
from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import EXPECTED_ERRORS
from mcp_sandbox.commands.doctor_report import SearchProviderReport, WebReport
from mcp_sandbox.commands.next_steps import NEXT_STEPS
from mcp_sandbox.commands.run import OWNER
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.views import with_next_step

ASK_S = 120.0  # for a machine to start, and for all providers to answer


async def examine_web(settings: Settings, *, ask: bool) -> WebReport:
    """Return the providers that are set up. With `ask`, a machine is started and asks each of them."""
    names = settings.web.search_providers
    report = WebReport(providers=[SearchProviderReport(name=name) for name in names])
    if not ask or not names:
        return report
    try:
        with anyio.fail_after(ASK_S):
            problems = await _ask(settings)
    except TimeoutError:
        return report.model_copy(update={"problem": f"it took longer than {ASK_S:g} s"})
    except EXPECTED_ERRORS as error:
        words = with_next_step(error, NEXT_STEPS) if isinstance(error, SandboxError) else str(error)
        return report.model_copy(update={"problem": words})
    asked = [
        SearchProviderReport(name=name, answers=problem is None, problem=problem) for name, problem in problems.items()
    ]
    return report.model_copy(update={"providers": asked})


async def _ask(settings: Settings) -> dict[str, str | None]:
    try:
        async with open_host(settings) as host, open_service(host, pooled=False) as service:
            return await service.web.probe_search(OWNER)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
