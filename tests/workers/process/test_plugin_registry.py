"""Things by name: our own, those of other packages, and those that cannot be loaded."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from paceline.errors import ConfigError, InvalidRequestError
from workers.process import plugin_registry as registries
from workers.process.plugin_registry import Registry
from workers.verification.rule import RULES

GROUP = "paceline.test_registry"


@dataclass(frozen=True)
class Thing:
    name: str
    help: str = "A thing"


def registry_of(*names: str) -> Registry[Thing]:
    def load_own() -> None:
        for name in names:
            registry.add(Thing(name))

    registry = Registry[Thing]("thing", group=GROUP, load_own=load_own)
    return registry


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package whose entry points are `good` and `broken`."""
    info = tmp_path / "more_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-things\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\ngood = more_good_things\nbroken = more_broken_things\n"
        "[paceline.old_things]\nold = more_old_things\n"
        "[paceline.test_registri]\nlost = more_lost_things\n"
    )
    for module in ("more_old_things", "more_lost_things"):
        (tmp_path / f"{module}.py").write_text("")
    (tmp_path / "more_good_things.py").write_text("LOADED = True\n")
    (tmp_path / "more_broken_things.py").write_text(
        "import things_registry\n"
        "things_registry.REGISTRY.add(things_registry.half_made)\n"
        "raise OSError('no such table')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for module in ("good", "broken", "old", "lost"):
        sys.modules.pop(f"more_{module}_things", None)


def test_things_are_in_the_order_of_their_names_whoever_registers_first() -> None:
    registry = registry_of("b", "a-2", "c")
    assert list(registry) == ["a-2", "b", "c"]
    assert "b" in registry
    assert "d" not in registry
    assert registry.get("b", field="thing").help == "A thing"


def test_threads_that_ask_at_once_see_all_things() -> None:
    begun = threading.Event()

    def load_own() -> None:
        registry.add(Thing("a"))
        begun.set()
        time.sleep(0.2)
        registry.add(Thing("b"))
        assert registry.get("a", field="thing").name == "a", (
            "while it loads, the same thread may ask"
        )

    registry = Registry[Thing]("thing", group=GROUP, load_own=load_own)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(registry.all)
        begun.wait()
        second = threads.submit(registry.all)
        assert list(first.result()) == list(second.result()) == ["a", "b"]


def test_an_unknown_name_is_refused_with_its_field_and_the_nearest_name() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"expected one of chain, off, got 'chian'.*chain"
    ):
        registry_of("off", "chain").get("chian", field="policy")


@pytest.mark.parametrize("name", ["", "Chain", "a b", "-a", "2a", "a" * 33, "a/../b"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name of lower-case letters"):
        registry_of().add(Thing(name))


def test_a_name_belongs_to_one_thing() -> None:
    registry = registry_of("a")
    registry.all()
    with pytest.raises(ConfigError, match="two packages register the thing 'a'"):
        registry.add(Thing("a", "Another"))
    assert registry.get("a", field="thing").help == "A thing"


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_raises_leaves_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_of("a")
    module = ModuleType("things_registry")
    vars(module).update(REGISTRY=registry, half_made=Thing("half"))
    monkeypatch.setitem(sys.modules, "things_registry", module)
    with caplog.at_level(logging.ERROR):
        assert list(registry) == ["a"]
    assert "more_good_things" in sys.modules
    assert "'broken'" in caplog.text
    with pytest.raises(InvalidRequestError, match=r"its package failed: .*no such table"):
        registry.get("broken", field="thing")
    with pytest.raises(InvalidRequestError) as caught:
        registry.get("b", field="thing")
    assert "no such table" not in str(caught.value), "that is for who asks for the broken one"


@pytest.mark.usefixtures("installed")
def test_an_old_group_is_read_and_an_unknown_one_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registries._OLD_GROUPS == {"paceline.limits": "paceline.rules"}
    assert RULES._group == "paceline.rules"
    monkeypatch.setattr(registries, "_OLD_GROUPS", {"paceline.old_things": GROUP})
    monkeypatch.setattr(registries, "_told", set())
    registry = registry_of("a")
    with caplog.at_level(logging.WARNING):
        assert list(registry) == ["a"]
    assert "more_old_things" in sys.modules
    assert f"'old' is in the group paceline.old_things: name it in {GROUP}" in caplog.text
    assert "more_lost_things" not in sys.modules
    assert "'lost' is in the group paceline.test_registri, which nothing reads" in caplog.text
    with pytest.raises(
        InvalidRequestError, match=rf"test_registri, which nothing reads.*did you mean {GROUP}\?"
    ):
        registry.get("lost", field="thing")


def test_own_things_that_cannot_be_loaded_are_an_error_each_time() -> None:
    def load_own() -> None:
        raise ConfigError("two of a name")

    registry = Registry[Thing]("thing", group=GROUP, load_own=load_own)
    for _ in range(2):
        with pytest.raises(ConfigError, match="two of a name"):
            registry.all()
