"""Jobs that the host gives to workers in a machine: what both ends agree on.

A worker connects to the tunnel and writes PREFACE. The stream then belongs to one job:

    host    length, JSON object: {"kind": …, "token": …, and the fields of that kind}
    worker  two lengths, JSON object, body; an object {"error": {"code", "message", …}} says that the job failed

Then the worker ends: a process serves one job.
"""

import struct

PREFACE = b"MCP-SANDBOX-JOB\n"
JOB = struct.Struct(">I")
ANSWER = struct.Struct(">II")  # of the JSON object, of the body
MAX_JOB = 4 * 1024 * 1024  # bytes; a file of certificates fits
MAX_HEADER = 1024 * 1024
MAX_BODY = 256 * 1024 * 1024
TOKEN_USER = "job"  # noqa: S105 - the user name that goes with a token in Proxy-Authorization
