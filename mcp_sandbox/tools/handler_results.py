"""The result of a handler's call, in words for a model."""

from guest.client.reports import HandlerReport

MAX_RESULT_CHARS = 16 * 1024  # what a machine sends of a result, if it is an honest one


def result_part(report: HandlerReport, how_to_read: str) -> str:
    """What the handler gave back. `how_to_read` says how to get at a file that has all of it."""
    if report.result is None:
        return ""
    result = report.result[:MAX_RESULT_CHARS]
    if report.result_file is None and len(report.result.encode()) >= report.result_bytes:
        return f"result:\n{result}"
    left_out = "not kept: there was no room to write it to a file" if report.result_file is None else how_to_read
    return f"result:\n{result}\n[… cut; the whole JSON has {report.result_bytes:,} bytes: {left_out} …]"


def measured_part(report: HandlerReport) -> str:
    """What the call took, on one line."""
    return f"handler: {report.end.wall_ms:,} ms, CPU {report.end.cpu_ms:,} ms, peak memory {_peak(report)}"


def _peak(report: HandlerReport) -> str:
    least, most = (_megabytes(size) for size in (report.least_peak_bytes, report.end.peak_bytes or 0))
    if least >= most:
        return f"{least:,} MB"
    return f"{least:,} to {most:,} MB (an earlier peak hides the exact one)"


def _megabytes(size: int) -> int:
    return round(size / 2**20)
