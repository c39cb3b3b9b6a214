"""A second host, as far as the network goes: a namespace at the other end of a virtual cable.

It has its own interfaces, loopback and ports. Needs root and the command `ip`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from tests.cluster.shard_processes import Host

_BLOCK, _PART = divmod(os.getpid() % 4096, 16)
"""The addresses differ for each run of the tests, so several runs can go on side by side."""
_HERE, *_THERE = (f"10.213.{_BLOCK}.{16 * _PART + number}" for number in range(1, 12))
HERE = Host(_HERE)


class CannotMakeHostsError(Exception):
    """This machine does not allow network namespaces."""


class SecondHost:
    """A context manager that raises CannotMakeHostsError.

    `host`: the other host; HERE is ours. `hosts`: its ten addresses, as if there were ten hosts
    behind one cable.
    """

    def __init__(self) -> None:
        self._name = f"pl-{os.getpid()}"
        self._cable = f"plc{os.getpid()}"
        self.hosts = [Host(there, ("ip", "netns", "exec", self._name)) for there in _THERE]
        self.host = self.hosts[0]

    def __enter__(self) -> SecondHost:
        far = f"{self._cable}x"
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", far)
            _ip("link", "set", far, "netns", self._name)
            _ip("addr", "add", f"{HERE.address}/28", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            for command in (
                *(("addr", "add", f"{there}/28", "dev", far) for there in _THERE),
                ("link", "set", far, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", self._name, *command)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise CannotMakeHostsError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        for command in (("link", "del", self._cable), ("netns", "del", self._name)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(*command)

    def cut(self) -> None:
        """Pull the cable: nothing passes, and neither side is told."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self._cable, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
