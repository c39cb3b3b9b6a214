"""API keys: how one is made, the file that lists their hashes, and the file read again if changed.

The file has a JSON object a line, with the fields of `KeyEntry`. Empty lines and lines that begin
with "#" are skipped. A key is 256 random bits, so nobody can try all keys against a hash. A slow
hash protects passwords, which people choose; here it would only make each call slow, and a flood of
wrong keys expensive.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError
from paceline.limits import MAX_NAME_LENGTH
from paceline.text import did_you_mean

MAX_KEYS = 10_000
"""Most keys of a file."""

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Most bytes of a file of keys."""

MAX_KEY_LENGTH = 512
"""Most characters of a key. A longer one is refused unread."""

LOOK_SECONDS = 1.0
"""Time between two looks at the file, and so how long a key that was removed may still work."""

USUAL_CONCURRENCY = 64
"""Requests that a key may have at once if its entry does not say."""

_PREFIX = "paceline-"
"""Begins each key that we make, so that scanners for secrets find it."""

_NO_DIGEST = bytes(32)
_log = logging.getLogger(__name__)

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
Role = Literal["user", "operator"]


class KeyEntry(BaseModel):
    """A key's line in the file.

    - `name`: of the key, unique, for logs and limits. `tenant`: whose requests it sends.
    - `sha256`: of the key, in hex.
    - `role`: an operator's key may also read counters, traces, reflection and metrics.
    - `concurrency`: requests that it may have at once. `requests_per_minute`: None: any number.
    - `priority`: 0 to 100. Waiting requests of a higher priority are let in first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Name
    tenant: Name
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    role: Role = "user"
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] = USUAL_CONCURRENCY
    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] = 0


def new_key() -> str:
    """A new key: 256 random bits in printable ASCII."""
    return _PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def gateway_entry(key: str) -> KeyEntry:
    """The entry of a key that a deployment makes for its own gateway, to look at its driver."""
    name = "gateway of this deployment"
    return KeyEntry(name=name, tenant=name, sha256=digest_of(key).hex(), role="operator")


def read_keys(path: Path) -> dict[bytes, KeyEntry]:
    """The entries of a file by the digests of their keys.

    Raises ConfigError, which names the line and never quotes it: somebody may have written a key
    where its hash belongs.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"API keys: {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"API keys: {path} has more than {MAX_FILE_BYTES:,} bytes")
    entries: dict[bytes, KeyEntry] = {}
    names: set[str] = set()
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        where = f"API keys: {path}:{number}"
        try:
            entry = KeyEntry.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(f"{where}: {_explained(error)}") from None
        digest = bytes.fromhex(entry.sha256)
        if entry.name in names:
            raise ConfigError(f"{where}: a line above has the same name; give each key its own")
        if digest in entries:
            raise ConfigError(f"{where}: a line above has the same sha256; make a key for each")
        if len(entries) == MAX_KEYS:
            raise ConfigError(f"{where}: expected at most {MAX_KEYS:,} keys")
        names.add(entry.name)
        entries[digest] = entry
    return entries


def _explained(error: ValidationError) -> str:
    wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, wrong["loc"]))
    known = list(KeyEntry.model_fields)
    if not place:
        return "expected a JSON object, as `paceline keys new` prints it"
    if wrong["type"] == "extra_forbidden":
        if place not in known and len(place) > MAX_NAME_LENGTH:
            place = "a field with a long name"
        hint = did_you_mean(place, known)
        return f"unknown field {place}; expected one of {', '.join(known)}{hint}"
    if wrong["type"] == "missing":
        return f"{place} is missing"
    if place == "sha256":
        return "sha256: expected 64 digits of lower-case hex"
    return f"{place}: {wrong['msg'].replace('Input should be', 'expected')}"


_Mark = tuple[int, int, int, int]


class KeyFile:
    """The keys of a file. A lookup reads it again if it has changed; a broken one changes nothing.

    It is looked at once in LOOK_SECONDS, at a lookup. `clock` counts seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        own: Sequence[KeyEntry] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: entries besides those of the file. Raises ConfigError if it cannot be used."""
        self.path = path
        self._own = own
        self.on_change: Callable[[], None] = lambda: None
        """Called when other keys are in use."""
        self._clock = clock
        self._mark = _mark_of(path)
        self._looked_at = clock()
        self._entries: Mapping[bytes, KeyEntry] = {}
        self._by_name: Mapping[str, KeyEntry] = {}
        self._use(read_keys(path))

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> KeyEntry | None:
        """The entry of a key; None: nobody has it.

        The table is asked for the digest, of which a caller cannot choose a single bit, and Python
        compares digests only if their keyed 64-bit hashes are equal. So times tell nothing.
        """
        self._look()
        if len(key) > MAX_KEY_LENGTH:
            return None
        digest = digest_of(key)
        entry = self._entries.get(digest)
        listed = _NO_DIGEST if entry is None else bytes.fromhex(entry.sha256)
        return entry if hmac.compare_digest(listed, digest) else None

    def named(self, name: str) -> KeyEntry | None:
        self._look()
        return self._by_name.get(name)

    def _use(self, entries: Mapping[bytes, KeyEntry]) -> None:
        self._entries = {**entries, **{bytes.fromhex(one.sha256): one for one in self._own}}
        self._by_name = {entry.name: entry for entry in self._entries.values()}

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        mark = _mark_of(self.path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            entries = read_keys(self.path)
        except ConfigError as error:
            _log.error("%s; the %d keys from before are still in use", error, len(self._entries))
            return
        self._use(entries)
        _log.warning("API keys: %s was read again: %d keys", self.path, len(entries))
        self.on_change()


def _mark_of(path: Path) -> _Mark | None:
    """What changes with the file, also if it is replaced, or is a link to another one."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
