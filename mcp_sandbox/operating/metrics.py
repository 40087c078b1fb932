"""Prometheus metrics of a server, and optional OpenTelemetry spans."""

import importlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Literal

import anyio
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from guest.client.streams import ServeStream
from mcp_sandbox.errors import HostLost
from mcp_sandbox.machines.provider import Frozen, Lease, MachineRequest, Provider, ProviderLayer
from mcp_sandbox.operating.database import Machine, MachineState
from mcp_sandbox.sandboxes.lifecycle import State
from vmm.errors import VmmError
from websearch.access import Access

# From a pool hit to a cold start under emulation on a busy host.
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 20, 30)

Stage = Literal["restore", "acquire"]

logger = logging.getLogger(__name__)

_tracer: Any = None  # OpenTelemetry's state is global too: one tracer per process


class Metrics:
    """The metrics of one server. Labels take few values, and clients cannot choose them."""

    def __init__(self, machines: Callable[[], Iterable[Machine]]) -> None:
        self._registry = CollectorRegistry()
        self._seconds = {
            "restore": Histogram(
                "mcp_sandbox_restore_seconds",
                "Time to restore and greet a machine.",
                ["template"],
                buckets=BUCKETS_S,
                registry=self._registry,
            ),
            "acquire": Histogram(
                "mcp_sandbox_acquire_seconds",
                "Time until a sandbox had its machine, pooled or not, including its wait in the queue.",
                ["template"],
                buckets=BUCKETS_S,
                registry=self._registry,
            ),
        }
        self._failures = self._counter("failures", "Machines that could not be started.", "stage", "error")
        self._pool = self._counter("pool_requests", "Requests to the pool.", "template", "outcome")
        self._runs = self._counter("runs", "Runs that ended, by outcome.", "template", "outcome")
        self._refused = self._counter("refused", "Requests refused because of a limit.", "limit")
        self._network = self._counter("network_requests", "Requests of sandboxes by verdict.", "verdict", "rule")
        self._network_bytes = self._counter("network_bytes", "Bytes to and from sandboxes.", "direction")
        self._sandboxes = Gauge("mcp_sandbox_sandboxes", "Sandboxes by state.", ["state"], registry=self._registry)
        self._waiting = Gauge(
            "mcp_sandbox_waiting", "Machines that wait for room within the limits.", registry=self._registry
        )
        self._running: dict[object, Lease] = {}
        self._memory: Counter[str] = Counter()  # bytes by template, as of the last `measure`
        self._registry.register(_Machines(machines, self._memory))

    def _counter(self, name: str, what: str, *labels: str) -> Count:
        return Count(f"mcp_sandbox_{name}", what, labels, registry=self._registry)

    def took(self, stage: Stage, template: str, seconds: float) -> None:
        """Record how long it took to get a machine."""
        self._seconds[stage].labels(template).observe(seconds)

    def failed(self, stage: Stage, error: BaseException) -> None:
        """Count a machine that could not be started."""
        self._failures.labels(stage, type(error).__name__).inc()

    def pool_asked(self, template: str, *, hit: bool) -> None:
        """Count a request to the pool."""
        self._pool.labels(template, "hit" if hit else "miss").inc()

    def run_ended(self, template: str, outcome: str) -> None:
        """Count a run by its outcome: ok, error, exited, timeout, stopped, killed, lost …"""
        self._runs.labels(template, outcome).inc()

    def refused(self, limit: str) -> None:
        """Count a request refused because of a limit."""
        self._refused.labels(limit).inc()

    def network_accessed(self, access: Access) -> None:
        """Count a request to the network. Rules about one domain or network count as one: clients choose domains."""
        verdict = "allowed" if access.verdict.allowed else "refused"
        self._network.labels(verdict, access.verdict.rule.partition(":")[0]).inc()
        self._network_bytes.labels("sent").inc(access.sent)
        self._network_bytes.labels("received").inc(access.received)

    def seen(self, sandboxes: Iterable[State], waiting: int) -> None:
        """Set the number of sandboxes by state, and of machines in the queue."""
        counts = Counter(sandboxes)
        for state in State:  # report zero rather than nothing
            if state is not State.CLOSED:
                self._sandboxes.labels(state).set(counts[state])
        self._waiting.set(waiting)

    @contextmanager
    def running(self, lease: Lease) -> Iterator[None]:
        """Include a machine in the measurements as long as the block lasts."""
        key = object()  # a resumed machine has the id of the one that was paused, which may not have ended yet
        self._running[key] = lease
        try:
            yield
        finally:
            del self._running[key]

    async def measure(self) -> None:
        """Ask every running machine how much memory it uses."""
        memory: Counter[str] = Counter()
        for lease in list(self._running.values()):
            with suppress(VmmError, HostLost, OSError):  # it has just ended
                memory[lease.template.name] += (await lease.machine.usage()).memory_bytes
        self._memory.clear()
        self._memory.update(memory)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Machines(Collector):
    """Counts the machines whenever the metrics are read, and shows the memory that was measured before."""

    def __init__(self, machines: Callable[[], Iterable[Machine]], memory: Mapping[str, int]) -> None:
        self._machines = machines
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        counts: dict[tuple[str, str], int] = {}
        for machine in self._machines():
            for state in MachineState:  # report zero rather than nothing
                counts.setdefault((machine.template, state), 0)
            counts[machine.template, machine.state] += 1
        numbers = GaugeMetricFamily("mcp_sandbox_machines", "Machines by state.", labels=["template", "state"])
        for labels, count in counts.items():
            numbers.add_metric(labels, count)
        yield numbers
        sizes = GaugeMetricFamily(
            "mcp_sandbox_memory_bytes",
            "Memory of all machines: proportional set size, which counts shared pages once.",
            labels=["template"],
        )
        for template, size in self._memory.items():
            sizes.add_metric([template], size)
        yield sizes


class Measured(ProviderLayer):
    """Traces a source of machines, counts its failures and times its restores."""

    def __init__(self, source: Provider, metrics: Metrics, stage: Stage) -> None:
        super().__init__(source)
        self._metrics = metrics
        self._stage: Stage = stage

    def acquire(self, request: MachineRequest) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine and time it."""
        return self._timed(request.template, self._source.acquire(request))

    def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Restore a saved state and time it."""
        source = self._source.thaw(frozen, copy=copy, serve_stream=serve_stream)
        return self._timed(frozen.template.name, source)

    @asynccontextmanager
    async def _timed(self, template: str, source: AbstractAsyncContextManager[Lease]) -> AsyncIterator[Lease]:
        asked_at = anyio.current_time()
        async with AsyncExitStack() as stack:
            try:
                with _span(self._stage, template=template):
                    lease = await stack.enter_async_context(source)
            except Exception as error:
                self._metrics.failed(self._stage, error)
                raise
            if self._stage == "restore":
                stack.enter_context(self._metrics.running(lease))
                # Without the wait for its turn: that is no slow restore. The sandbox times its own acquire.
                took_s = anyio.current_time() - asked_at - lease.timings.queue_s
                self._metrics.took(self._stage, template, max(0.0, took_s))
            yield lease


def enable_tracing() -> None:
    """Emit spans from now on, to the exporter that OpenTelemetry's own variables configure."""
    global _tracer  # noqa: PLW0603
    try:
        _tracer = importlib.import_module("opentelemetry.trace").get_tracer("mcp-sandbox")
    except ImportError:
        logger.warning("cannot enable tracing: the package opentelemetry-api is not installed")


@contextmanager
def _span(name: str, **attributes: str | float | bool) -> Iterator[None]:
    """Wrap the block in a span if tracing is enabled. The span records an error that leaves the block."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes=attributes):
        yield


def merge(texts: dict[str, str]) -> str:
    """Merge the metrics of several servers; each sample gets a `server` label. A family may appear only once."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry).decode()


class _Merged(Collector):
    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for server, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):  # the creation time of a counter
                    continue
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(sample.name, {**sample.labels, "server": server}, sample.value)
        yield from families.values()
