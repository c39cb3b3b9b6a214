"""Files of API keys: what they may hold, that they are read again, and what a key may have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.access import gate as gates
from cluster.access.gate import LOG_SECONDS, Gate, check_operator, tenant_of
from cluster.access.keys import (
    LOOK_SECONDS,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    KeyFile,
    digest_of,
    new_key,
    read_keys,
)
from paceline.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.cluster.access.key_files import Clock, entry_of, keys_in, write_keys


def bearer(key: str) -> list[str]:
    return [f"Bearer {key}"]


def test_keys_are_random_and_printable() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.isascii() and key.isprintable() and len(key) >= 43 for key in keys)


def test_a_key_is_found_by_its_hash_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, alice={}, bob={"role": "operator"})
    found = KeyFile(path).find(keys["bob"])
    assert found is not None
    assert (found.name, found.tenant, found.role) == ("bob", "tenant of bob", "operator")
    assert keys["bob"] not in path.read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"name": "a", "tenant": "t"}', "sha256 is missing"),
        (json.dumps(entry_of("k", "a", sha256="SECRET" * 12)), "sha256: expected 64 digits"),
        (json.dumps(entry_of("k", "a", rolle="user")), "unknown field rolle"),
        (json.dumps(entry_of("k", "a", role="SECRET")), "role: expected 'user' or 'operator'"),
        (json.dumps(entry_of("k", "a", concurrency=0)), "concurrency: expected greater than"),
        (json.dumps(entry_of("k", "a", requests_per_minute=1.5)), "requests_per_minute: expected"),
        (json.dumps(entry_of("k", "x" * 129)), "name: String should have at most 128"),
        (json.dumps(entry_of("k", "first")), "a line above has the same name"),
        (json.dumps(entry_of("first", "b")), "a line above has the same sha256"),
    ],
)
def test_a_wrong_line_is_named_and_never_quoted(tmp_path: Path, line: str, told: str) -> None:
    """Somebody may have written the key itself where its hash belongs."""
    path = tmp_path / "keys"
    path.write_text(f"{json.dumps(entry_of('first', 'first'))}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert str(caught.value).startswith(f"API keys: {path}:2: {told}")
    assert "SECRET" not in str(caught.value)


def test_the_number_of_keys_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, *(entry_of(str(number), str(number)) for number in range(MAX_KEYS + 1)))
    with pytest.raises(ConfigError, match="at most 10,000 keys"):
        read_keys(path)


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyFile(tmp_path / "absent")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    first = keys_in(path, alice={})["alice"]
    keys = KeyFile(path, clock=clock)
    second = keys_in(path, alice={})["alice"]
    assert keys.find(second) is None, "it is not looked at yet"
    clock.now += LOOK_SECONDS
    assert keys.find(second) is not None
    assert keys.find(first) is None
    path.write_text("{")
    for _ in range(5):
        clock.now += LOOK_SECONDS
        assert keys.find(second) is not None
    path.unlink()
    for _ in range(5):
        clock.now += LOOK_SECONDS
        assert keys.find(second) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    third = keys_in(path, alice={})["alice"]
    clock.now += LOOK_SECONDS
    assert keys.find(third) is not None
    assert keys.find(second) is None
    assert not any(key in caplog.text for key in (first, second, third))


def test_a_mounted_secret_is_read_again(tmp_path: Path) -> None:
    """Kubernetes changes a link in the path; the file itself never changes."""
    clock = Clock()
    made = {}
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        made[version] = keys_in(tmp_path / version / "keys", alice={})["alice"]
    (tmp_path / "data").symlink_to("1")
    keys = KeyFile(tmp_path / "data" / "keys", clock=clock)
    (tmp_path / "new").symlink_to("2")
    os.replace(tmp_path / "new", tmp_path / "data")
    clock.now += LOOK_SECONDS
    assert keys.find(made["1"]) is None
    assert keys.find(made["2"]) is not None


@pytest.mark.parametrize(
    "header",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["Basic dTpw"],
        ["Bearer KEY", "Bearer KEY"],
        ["Bearer KEY more"],
        ["Bearer " + "x" * (MAX_KEY_LENGTH + 1)],
        ["Bearer " + "x" * 10_000_000],
        ["Bearer k\xe9y"],
        ["Bearer \ud800"],
        ["KEY"],
    ],
)
def test_only_one_bearer_header_with_a_known_key_passes(tmp_path: Path, header: list[str]) -> None:
    path = tmp_path / "keys"
    key = keys_in(path, alice={})["alice"]
    gate = Gate(KeyFile(path))
    header = [value.replace("KEY", key) for value in header]
    with pytest.raises(UnauthenticatedError) as caught:
        gate.caller(header, peer="here")
    assert key not in str(caught.value)
    assert len(str(caught.value)) < 100
    assert gate.caller([f"bearer  {key}"], peer="here").name == "alice"


def test_wrong_keys_are_logged_now_and_then_and_never_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    keys_in(path, alice={})
    gate = Gate(KeyFile(path, clock=clock), clock=clock)
    wrong = [new_key() for _ in range(1000)]
    for key in wrong:
        clock.now += 3 * LOG_SECONDS / 1000
        with pytest.raises(UnauthenticatedError):
            gate.caller(bearer(key), peer="ipv4:10.0.0.7:1")
    assert 1 <= len(caplog.records) <= 4
    assert "ipv4:10.0.0.7:1" in caplog.text
    assert not any(key in caplog.text for key in wrong)
    assert len(gate.quotas) == 0, "a wrong key takes no memory"


def test_a_key_has_at_most_its_concurrency_and_others_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, alice={"concurrency": 2}, bob={"concurrency": 2})
    gate = Gate(KeyFile(path), clock=Clock())
    alice, bob = (gate.caller(bearer(keys[name]), peer="") for name in ("alice", "bob"))
    held = [gate.quotas.ticket(alice) for _ in range(2)]
    for _ in range(1000):
        with pytest.raises(RateLimitedError) as caught:
            gate.quotas.ticket(alice)
        assert caught.value.retry_seconds == gates.RETRY_SECONDS
    others = [gate.quotas.ticket(bob) for _ in range(2)]
    held[0].release()
    held[0].release()
    held.append(gate.quotas.ticket(alice))
    with pytest.raises(RateLimitedError):
        gate.quotas.ticket(alice)
    for ticket in (*held, *others):
        ticket.release()
    with pytest.raises(PermissionDeniedError, match="counts as 3 requests"):
        gate.quotas.ticket(alice).add(2)


def test_a_key_begins_at_most_its_rate(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    key = keys_in(path, alice={"requests_per_minute": 30})["alice"]
    gate = Gate(KeyFile(path, clock=clock), clock=clock)
    alice = gate.caller(bearer(key), peer="")
    begun, waits = 0, []
    for _ in range(6000):  # Ten minutes, ten attempts a second.
        clock.now += 0.1
        try:
            gate.quotas.ticket(alice).release()
        except RateLimitedError as error:
            waits.append(error.retry_seconds or 0.0)
        else:
            begun += 1
    assert 0 < min(waits) <= max(waits) <= 2.0
    # The first minute has its 30 at once besides those that come back in it.
    assert 10 * 30 <= begun <= 11 * 30
    clock.now += 2.0
    gate.quotas.ticket(alice)


def test_what_a_server_cannot_take_does_not_count_in_the_rate(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    key = keys_in(path, alice={"requests_per_minute": 2})["alice"]
    gate = Gate(KeyFile(path, clock=clock), clock=clock)
    alice = gate.caller(bearer(key), peer="")
    for error in (OverloadedError("full"), UnavailableError("lost")) * 2:
        with pytest.raises(type(error)), gate.quotas.place(alice):
            raise error
    with pytest.raises(InvalidRequestError), gate.quotas.place(alice):
        raise InvalidRequestError("seed", "wrong")  # The caller's own fault: it counts.
    with gate.quotas.place(alice), pytest.raises(RateLimitedError):
        gate.quotas.ticket(alice)


def test_a_removed_key_ends_and_its_count_is_forgotten(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    keys = keys_in(path, alice={}, bob={})
    gate = Gate(KeyFile(path, clock=clock), clock=clock)
    alice, bob = (gate.caller(bearer(keys[name]), peer="") for name in ("alice", "bob"))
    held = gate.quotas.ticket(alice)
    gate.quotas.ticket(bob).release()
    write_keys(path, entry_of(keys["bob"], "bob", concurrency=7))
    clock.now += LOOK_SECONDS
    with pytest.raises(UnauthenticatedError, match="'alice' is no longer valid"):
        gate.present(alice)
    assert gate.present(bob).concurrency == 7
    assert len(gate.quotas) == 2, "a request of alice runs"
    held.release()
    write_keys(path, entry_of("new", "bob"))
    clock.now += LOOK_SECONDS
    with pytest.raises(UnauthenticatedError):
        gate.present(bob)
    assert len(gate.quotas) == 1


def test_roles_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, alice={}, boss={"role": "operator"})
    gate = Gate(KeyFile(path))
    alice, boss = (gate.caller(bearer(keys[name]), peer="") for name in ("alice", "boss"))
    check_operator(boss, "Stats")
    with pytest.raises(PermissionDeniedError, match="Stats needs an operator's API key; 'alice'"):
        check_operator(alice, "Stats")
    assert tenant_of(alice, None) == tenant_of(alice, "") == "tenant of alice"
    assert tenant_of(alice, "tenant of alice") == "tenant of alice"
    with pytest.raises(PermissionDeniedError):
        tenant_of(alice, "tenant of boss")


def test_a_lookup_ends_with_a_comparison_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By construction: every key of an allowed length is hashed once and compared once."""
    import hmac

    path = tmp_path / "keys"
    key = keys_in(path, alice={}, bob={})["alice"]
    keys = KeyFile(path)
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr("cluster.access.keys.hmac.compare_digest", compare)
    for tried in (key, key[:-1], "x", ""):
        compared.clear()
        assert (keys.find(tried) is not None) == (tried == key)
        assert [one[1] for one in compared] == [digest_of(tried)]
        assert len(compared[0][0]) == 32
