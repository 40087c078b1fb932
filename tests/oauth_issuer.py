"""A small OAuth issuer on this host: it publishes keys and signs access tokens."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

RESOURCE = "https://box.test/mcp"


@dataclass
class FakeIssuer:
    """What it answers can be changed at any time."""

    url: str
    keys: dict[str, ec.EllipticCurvePrivateKey] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)  # by path; instead of what it would answer
    asked: list[str] = field(default_factory=list)  # paths

    def new_key(self, kid: str) -> None:
        """Use a new key from now on, beside the others."""
        self.keys[kid] = ec.generate_private_key(ec.SECP256R1())

    def token(
        self, subject: str = "ana", *, kid: str | None = None, head: dict[str, str] | None = None, **claims: Any
    ) -> str:
        """An access token for the server; claims that are None are left out."""
        kid = kid or list(self.keys)[-1]
        now = int(time.time())
        body = {"iss": self.url, "sub": subject, "aud": RESOURCE, "exp": now + 60, "scope": "use"} | claims
        kept = {name: value for name, value in body.items() if value is not None}
        return jwt.encode(kept, self.keys[kid], "ES256", {"kid": kid, "typ": "at+jwt", **(head or {})})

    def answer(self, path: str) -> Any:
        self.asked.append(path)
        if path in self.documents:
            return self.documents[path]
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return {"keys": list(map(self.public, self.keys))} if path == "/keys" else None

    def public(self, kid: str) -> dict[str, Any]:
        key = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.keys[kid].public_key()))
        return {**key, "kid": kid, "use": "sig", "alg": "ES256"}


@contextmanager
def serving_issuer() -> Iterator[FakeIssuer]:
    """An issuer with one key, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = issuer.answer(self.path)
            body = json.dumps(found).encode()
            if isinstance(found, str):  # a redirect
                self.send_response(302)
                self.send_header("Location", found)
            else:
                self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer = FakeIssuer(f"http://127.0.0.1:{server.server_address[1]}")
        issuer.new_key("first")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield issuer
        finally:
            server.shutdown()
            thread.join()
