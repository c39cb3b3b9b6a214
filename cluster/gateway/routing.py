"""Which driver gets a request: the one that served its beginning last, unless it is too busy.

A driver that has served a prompt with the same beginning has its KV (target.prefix_cache), so its
prefill is shorter. Tokens are not known here, so beginnings are compared by blocks of what the
caller sent: text, messages or token ids. A request goes to the driver that got the longest shared
beginning last, while that one runs at most SLACK + SHARE times the requests of the least busy one.
Else, and without a shared beginning, it goes to the least busy one; of equally busy ones, to the
one that was chosen least recently. Loads are the requests that this gateway has given to each
driver.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol, TypeVar, cast

from paceline.chat import Message, json_text, message_of
from paceline.generation import GenerateInput, chat_of

BLOCK_BYTES = 256
"""Bytes of a block, about 60 tokens of English text. A shorter prompt has no beginning to share."""

MAX_BLOCKS = 256
"""Most blocks of a prompt that are compared: its first 64 KiB. Beyond that they rarely differ."""

MAX_TENANTS = 256
"""Most tenants whose beginnings are remembered; the one that asked least recently is forgotten."""

MAX_BEGINNINGS = 8192
"""Most blocks that are remembered for a tenant, about 1 MB. The oldest is forgotten first."""

SLACK, SHARE = 4, 1.5
"""A driver that has a beginning gets the request while it runs at most SLACK + SHARE times as many
requests as the least busy one. SGLang's router uses the same form. To prefill again costs less than
to wait behind that many requests."""

_TOKEN_BYTES, _LARGEST = 4, 0xFFFFFFFF


class Routed(Protocol):
    """A driver, as routing sees it. `num_running`: open sequences."""

    num_running: int

    @property
    def address(self) -> str:
        """It names the driver."""


_Driver = TypeVar("_Driver", bound=Routed)


class Router:
    """Remembers who served which beginnings, within bounds."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[bytes, str]] = OrderedDict()
        self._chosen: OrderedDict[str, None] = OrderedDict()
        """Drivers in the order in which they were chosen last."""

    def choose(self, drivers: Sequence[_Driver], given: GenerateInput, tenant: str) -> _Driver:
        """The driver for a request, which counts as served by it. `drivers` must not be empty."""
        if len(drivers) == 1:
            return drivers[0]
        blocks = list(_beginnings(given))
        served_by = self._served_by(tenant)
        least = min(one.num_running for one in drivers)
        chosen = self._holder(drivers, blocks, served_by)
        if chosen is None or chosen.num_running > SLACK + SHARE * least:
            order = {address: number for number, address in enumerate(self._chosen)}
            chosen = min(drivers, key=lambda one: (one.num_running, order.get(one.address, -1)))
        self._chosen[chosen.address] = None
        self._chosen.move_to_end(chosen.address)
        while len(self._chosen) > MAX_TENANTS:
            self._chosen.popitem(last=False)
        for block in blocks:
            served_by[block] = chosen.address
            served_by.move_to_end(block)
        while len(served_by) > MAX_BEGINNINGS:
            served_by.popitem(last=False)
        return chosen

    def _served_by(self, tenant: str) -> OrderedDict[bytes, str]:
        """By block, the address of the driver that was given it last."""
        found = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return found

    def _holder(
        self, drivers: Sequence[_Driver], blocks: Sequence[bytes], served_by: dict[bytes, str]
    ) -> _Driver | None:
        """The driver that was given the longest of these beginnings last."""
        by_address = {one.address: one for one in drivers}
        for block in reversed(blocks):
            driver = by_address.get(served_by.get(block, ""))
            if driver is not None:
                return driver
        return None


def _beginnings(given: GenerateInput) -> Iterator[bytes]:
    """A hash for each whole block, of everything up to its end."""
    digest = blake2b(digest_size=8)
    whole = _first_bytes(given, MAX_BLOCKS * BLOCK_BYTES)
    for end in range(BLOCK_BYTES, len(whole) + 1, BLOCK_BYTES):
        digest.update(whole[end - BLOCK_BYTES : end])
        yield digest.digest()


def _first_bytes(given: GenerateInput, count: int) -> bytes:
    """The first bytes of what the caller sent. Kinds of inputs never begin alike."""
    if isinstance(given, str):
        return b"t" + given[:count].encode(errors="replace")[: count - 1]
    found = bytearray()
    chat = chat_of(given)
    if chat is not None:
        found += b"m" + json_text("tools", chat.tools)[:count].encode(errors="replace")
        for message in chat.messages:
            if not isinstance(message, Message):
                message = message_of(message)
            found += f"{message.role}\0{message.content[:count]}\0".encode(errors="replace")
            if len(found) >= count:
                break
    else:
        found += b"i"
        for token_id in islice(cast("Iterable[int]", given), count // _TOKEN_BYTES):
            assert isinstance(token_id, int)
            found += (token_id & _LARGEST).to_bytes(_TOKEN_BYTES, "little")
    return bytes(found[:count])
