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
        hint = did_you_mean(name, entries) if why is None else f"; its package failed: {why}"
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
        for point in entry_points(group=self._group):
            before = dict(self._entries)
            try:
                point.load()
            except Exception as error:
                _log.exception("the entry point %r of %s cannot be loaded", point.name, self._group)
                self._failed[point.name] = f"{point.value} raised {error!r}"
                self._entries = before
        self._entries = dict(sorted(self._entries.items()))
        self._loaded = True
