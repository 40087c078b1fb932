"""An agent that runs no code but answers well enough for the host side to work with it."""

import time
from typing import Any

import anyio
from anyio.abc import ByteStream

from guest.protocol import Decoder, Frame, encode

NOTHING_WRITTEN = {"stdout_bytes": 0, "stderr_bytes": 0, "spill_complete": True, "displays_dropped": 0}
END: dict[str, Any] = {"ok": True, "state": "kept", "output": NOTHING_WRITTEN}


class FakeGuest:
    """Has one variable, which the code `count` increments and prints. `forever` and `stubborn` run until stopped.

    Commands run beside code. Those with open input read all of it.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self.memory = memory
        self.run: tuple[int, str] | None = None  # the active request and its code
        self.commands: set[int] = set()  # active ones
        self.input = b""
        self.files: dict[str, bytes] = {}
        self.uploads: dict[int, bytes] = {}  # incomplete files
        self._stream: ByteStream

    @property
    def count(self) -> int:
        return int(self.memory.get("count", 0))

    async def serve(self, stream: ByteStream) -> None:
        self._stream = stream
        decoder = Decoder()
        try:
            while True:
                for frame in decoder.feed(await stream.receive()):
                    await getattr(self, f"_{frame.header['op']}")(frame)
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass

    async def _send(self, number: int, header: dict[str, Any], body: bytes = b"") -> None:
        await self._stream.send(encode({"id": number, **header}, body))

    async def _ok(self, frame: Frame, body: bytes = b"", **header: Any) -> None:
        await self._send(frame.header["id"], {"ok": True, **header}, body)

    async def _hello(self, frame: Frame) -> None:
        about = {key: frame.header[key] for key in ("version", "nonce")}
        about |= {"agent": "fake", "language": "python", "language_version": "3"}
        await self._send(frame.header["id"], {"ok": True, **about})

    async def _refresh(self, frame: Frame) -> None:
        done = dict.fromkeys(("entropy_credited", "hostname_set"), True)
        await self._send(frame.header["id"], {"ok": True, "time_ns": time.time_ns(), **done})

    async def _rehearse(self, frame: Frame) -> None:
        await self._ok(frame)

    async def _settle(self, frame: Frame) -> None:
        await self._ok(frame)

    async def _ping(self, frame: Frame) -> None:
        await self._ok(frame)

    async def _run(self, frame: Frame) -> None:
        number, code = frame.header["id"], frame.body[: frame.header.get("code_bytes")].decode()
        if frame.header.get("kind") == "command":
            await self._command(number, code, reads=frame.header.get("stdin_open") is True)
            return
        if self.run is not None:
            await self._send(number, {"ok": False, "error": {"code": "busy", "message": "another run is active"}})
            return
        self.run = number, code
        if code == "count":
            self.memory["count"] = self.count + 1
            await self._send(number, {"event": "output", "stream": "stdout"}, f"{self.count}\n".encode())
            await self._finish("ok")

    async def _command(self, number: int, code: str, *, reads: bool) -> None:
        self.commands.add(number)
        if reads:
            await self._send(number, {"event": "window", "bytes": 10})
        if code != "forever":
            await self._end_command(number, "ok")

    async def _end_command(self, number: int, status: str) -> None:
        self.commands.remove(number)
        await self._send(number, {**END, "status": status})

    async def _stdin(self, frame: Frame) -> None:
        self.input += frame.body
        if frame.body and frame.header["run"] in self.commands:
            await self._send(frame.header["run"], {"event": "window", "bytes": len(frame.body)})
        await self._ok(frame)

    async def _stop(self, frame: Frame) -> None:
        if frame.header["run"] in self.commands:
            await self._end_command(frame.header["run"], "interrupted")
        if self.run is not None and self.run[0] == frame.header["run"]:
            if self.run[1] == "stubborn":
                self.memory["count"] = 0
                await self._finish("killed", "lost", signal="SIGKILL")
            else:
                await self._finish("interrupted")
        await self._ok(frame)

    async def _finish(self, status: str, state: str = "kept", **more: Any) -> None:
        assert self.run is not None
        (number, _), self.run = self.run, None
        await self._send(number, {**END, "status": status, "state": state, **more})

    async def _write(self, frame: Frame) -> None:
        header = frame.header
        data = self.uploads.pop(header["upload"], b"") + frame.body
        if not header["last"]:
            self.uploads[header["upload"]] = data
            await self._ok(frame)
            return
        self.files[header["path"]] = data
        entry = {"path": header["path"], "kind": "file", "size": len(data), "mtime": 0}
        await self._ok(frame, file=entry)

    async def _abandon(self, frame: Frame) -> None:
        self.uploads.pop(frame.header["upload"], None)
        await self._ok(frame)

    async def _read(self, frame: Frame) -> None:
        data, offset = self.files[frame.header["path"]], frame.header["offset"]
        part = data[offset : offset + frame.header["limit"]]
        await self._ok(frame, part, size=len(data), eof=offset + len(part) >= len(data))
