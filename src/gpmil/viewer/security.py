"""Who may ask what: by the right name, with the token where one is needed, marks from our page.

A page of another origin can make a browser send requests here, and can point a name of its own at
this computer (DNS rebinding). Against the first stand the same-origin policies, against the second
the check of the Host header. What writes (marks of patches) is a POST whose Origin is this server,
with a body of JSON, which no page of another origin can send unasked.
"""

import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

CSP = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
# Answers are kept by the browser alone, and asked about again: a run may have changed.
CACHE = "private, no-cache"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
COOKIE = "gpmil"
WRITES = re.compile(r"/api/marks/\d+(/(undo|redo|save))?")  # all that may be changed
LARGEST_BODY = 2_000_000  # bytes: a stroke over 100,000 patches
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,200}")  # what needs no quoting in an address or a cookie


@dataclass(frozen=True)
class Door:
    """The names this server goes by, and the token that opens it."""

    hosts: frozenset[str]
    token: str | None = None
    any_address: bool = False  # bound to all addresses: numbers are let in, names are not
    cookie: str = field(default=COOKIE)

    def knows(self, host: str) -> bool:
        """Whether a Host header names this server; the port is not looked at.

        Not by Starlette's TrustedHostMiddleware: it has a list of names, not "any number", answers
        in a text of its own, and reads [::1] in its latest versions only.
        """
        name = host_name(host)
        return name in self.hosts or (self.any_address and _is_address(name))


def door(host: str, token: str | None = None, port: int = 0) -> Door:
    """How a server at a host is entered; beyond this computer, never without a token."""
    if token and not TOKEN.fullmatch(token):
        raise ValueError("--token: expected letters, digits, - and _, 200 at most: it is in a URL.")
    outside = not is_loopback(host)
    if outside and not token:
        token = secrets.token_urlsafe(24)
    names = {host.lower(), *LOOPBACK}
    if outside:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    # Cookies do not tell ports apart: two viewers on one computer need two names.
    return Door(frozenset(names), token or None, host in EVERYWHERE, f"{COOKIE}-{port}")


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach the address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host.lower() == "localhost" or (
        _is_address(host) and ipaddress.ip_address(host).is_loopback
    )


def host_name(host: str) -> str:
    """The name in a Host header, without the port.

    >>> host_name("LOCALHOST:8000"), host_name("[::1]:80"), host_name("a.b")
    ('localhost', '::1', 'a.b')
    """
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Around the whole application, so that no answer leaves without its headers."""

    def __init__(self, app: App, entrance: Door) -> None:
        self.app, self.door = app, entrance

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        asked = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        extra = dict(HEADERS)
        if self._right(given):
            extra["set-cookie"] = f"{self.door.cookie}={given}; Path=/; HttpOnly; SameSite=Strict"
        refused = self._refusal(scope["method"], scope["path"], asked, given)
        guarded = _with_headers(send, extra)
        if refused is not None:
            await _answer(guarded, *refused)
            return
        await self.app(scope, receive, guarded)

    def _refusal(
        self, method: str, path: str, asked: dict[str, str], given: str
    ) -> tuple[int, str] | None:
        if not self.door.knows(asked.get("host", "")):
            return 400, "this server does not go by that name: open the address that gpmil printed."
        writes = method == "POST" and WRITES.fullmatch(path)
        if not writes and method not in ("GET", "HEAD"):
            return 405, f"{method} is not allowed: the viewer only reads here."
        if self.door.token and not (self._right(given) or self._right(self._kept(asked))):
            return 401, "the token is missing or wrong: open the address that gpmil printed."
        return _foreign(asked) if writes else None

    def _kept(self, asked: dict[str, str]) -> str:
        try:
            found = SimpleCookie(asked.get("cookie", "")).get(self.door.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _right(self, given: str) -> bool:
        token = self.door.token
        return bool(token and secrets.compare_digest(given.encode(), token.encode()))


def _foreign(asked: dict[str, str]) -> tuple[int, str] | None:
    """Why a request that writes does not come from our page, or is too large."""
    origin = asked.get("origin", "").partition("://")[2]
    site = asked.get("sec-fetch-site", "same-origin")
    if not origin or origin.lower() != asked["host"].strip().lower() or site != "same-origin":
        return 403, "marks are made on the viewer's own page: open the address that gpmil printed."
    if asked.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "expected a body of JSON."
    size = asked.get("content-length", "")
    if not size.isdecimal() or int(size) > LARGEST_BODY:
        return 413, f"expected a body of a stated length, at most {LARGEST_BODY:,} bytes."
    return None


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(k, v) for k, v in message["headers"] if k.decode().lower() not in extra]
            if not any(k.lower() == b"cache-control" for k, _ in kept):
                kept.append((b"cache-control", CACHE.encode()))
            kept += [(k.encode(), v.encode("latin-1")) for k, v in extra.items()]
            message = {**message, "headers": kept}
        await send(message)

    return sending


async def _answer(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
