"""A shared secret: entries that are signed with it are believed, others are ignored. Nothing is ever unpickled."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from hashlib import sha256
from os import PathLike
from pathlib import Path

from shardwise.errors import RefusedTypeError, RefusedValueError

MAC = 2 * sha256().digest_size  # hex digits
Key = str | bytes | PathLike[str] | None  # a secret, or a Path of a file with it


def secret_of(key: Key) -> bytes:
    """The bytes of the secret; none for None."""
    if key is None:
        return b""
    if isinstance(key, PathLike):
        try:
            secret = Path(key).read_bytes().strip()
        except OSError as error:
            raise RefusedValueError(f"key={str(key)!r} cannot be read: {error.strerror}") from error
    elif isinstance(key, str | bytes):
        secret = key.encode() if isinstance(key, str) else key
    else:
        raise RefusedTypeError(f"key= is a text, bytes, or a Path of a file, not a {type(key).__name__}")
    if not secret:
        raise RefusedValueError("key= is empty: give a secret that all jobs know, or a Path of a file with it")
    return secret


@dataclass(frozen=True)
class Seal:
    """Signs JSON values for one path, and opens those that were signed with the same secret for the same path."""

    secret: bytes = field(repr=False)

    def close(self, path: str, value: object) -> bytes:
        """The signed value."""
        body = json.dumps(value, separators=(",", ":")).encode()
        return self._mac(path, body) + body

    def open(self, path: str, entry: bytes) -> object:
        """The value; None if it was not signed with this secret for this path."""
        mac, body = entry[:MAC], entry[MAC:]
        if not hmac.compare_digest(mac, self._mac(path, body)):
            return None
        value: object = json.loads(body)
        return value

    def _mac(self, path: str, body: bytes) -> bytes:
        return hmac.digest(self.secret, path.encode() + b"\0" + body, "sha256").hex().encode()
