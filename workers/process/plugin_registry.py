"""Registries of entries by name, from this repository and from other installed packages.

Each entry has a file of its own, which calls `add` when it is imported. A registry imports the
files of this repository's folder for it, and the files that other packages name in entry points of
the registry's group (docs/extending.md).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, Protocol, TypeVar

from paceline.errors import ConfigError, InvalidRequestError
from paceline.text import did_you_mean

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")

GROUPS = ("paceline.rules", "paceline.policies", "paceline.drafters")
"""The groups of entry points that registries read."""

_OLD_GROUPS = {"paceline.limits": "paceline.rules"}
"""Names under which a group is read too, with a warning."""

_told: set[str] = set()
"""Groups of which a warning was logged: all registries look at all groups."""


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """The name on the wire and in files: at most 32 lower-case letters, digits and hyphens."""

    @property
    def help(self) -> str:
        """One line for people, without a period at its end."""


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Entries of one sort, such as verification rules, in the order of their names."""

    def __init__(self, noun: str, *, group: str, load_own: Callable[[], None]) -> None:
        """`noun`: what an entry is called in errors. `group`: the group of other packages' entry
        points.

        `load_own` imports this repository's own files, each of which calls `add`.
        """
        self._noun = noun
        self._group = group
        self._load_own = load_own
        self._entries: dict[str, T] = {}
        self._failed: dict[str, str] = {}
        self._loaded = self._is_loading = False
        self._loading = threading.RLock()  # A file may ask for another file's entry while it loads.

    def add(self, entry: T) -> T:
        """Register an entry. Raises ConfigError for a name that is malformed or taken."""
        name = entry.name
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{self._noun} {name!r}: expected a name of lower-case letters, digits and "
                "hyphens, at most 32, that begins with a letter"
            )
        if self._entries.setdefault(name, entry) is not entry:
            raise ConfigError(f"two packages register the {self._noun} {name!r}: remove one")
        return entry

    def get(self, name: str, *, field: str) -> T:
        """The entry with this name.

        Raises InvalidRequestError, with the field's name, if there is none.
        """
        entries = self.all()
        if name in entries:
            return entries[name]
        why = self._failed.get(name)
        hint = did_you_mean(name, entries) if why is None else f"; {why}"
        raise InvalidRequestError(
            field, f"expected one of {', '.join(entries)}, got {name!r}{hint}"
        )

    def all(self) -> Mapping[str, T]:
        """All entries. The first call imports their files and the packages that add others.

        An entry point that raises is logged, and what it added is left out. The others stay.
        """
        if not self._loaded:
            with self._loading:
                if not self._is_loading and not self._loaded:
                    self._is_loading = True
                    try:
                        self._load()
                    finally:
                        self._is_loading = False
        return self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __contains__(self, name: object) -> bool:
        return name in self.all()

    def _load(self) -> None:
        self._load_own()
        for group in sorted(entry_points().groups):
            if self._group in (group, _OLD_GROUPS.get(group)):
                self._load_group(group)
            elif group.startswith("paceline.") and group not in (*GROUPS, *_OLD_GROUPS):
                self._skip_group(group)
        self._entries = dict(sorted(self._entries.items()))
        self._loaded = True

    def _load_group(self, group: str) -> None:
        for point in entry_points(group=group):
            if group != self._group:
                _warn_once(
                    group,
                    f"the entry point {point.name!r} is in the group {group}: name it in "
                    f"{self._group}, since a later version reads no other",
                )
            before = dict(self._entries)
            try:
                point.load()
            except Exception as error:
                _log.exception("the entry point %r of %s cannot be loaded", point.name, group)
                self._failed[point.name] = f"its package failed: {point.value} raised {error!r}"
                self._entries = before

    def _skip_group(self, group: str) -> None:
        """Tell of a group that nothing reads, so that nobody wonders where its entries are."""
        known = sorted({*GROUPS, self._group})
        said = f"which nothing reads: expected {', '.join(known)}{did_you_mean(group, known)}"
        for point in entry_points(group=group):
            _warn_once(group, f"the entry point {point.name!r} is in the group {group}, {said}")
            self._failed[point.name] = f"its package names it in the group {group}, {said}"


def _warn_once(group: str, message: str) -> None:
    if group not in _told:
        _told.add(group)
        _log.warning("%s", message)
