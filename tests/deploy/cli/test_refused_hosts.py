"""`up` reports an address at which a server cannot listen before anything starts."""

from __future__ import annotations

import socket

import pytest

from cluster.config.model import Config, ServerConfig
from deploy.cli.up import refuse_taken_ports
from paceline.errors import UnavailableError


def config_at(host: str, port: int) -> Config:
    return Config(server=ServerConfig(host=host, http_port=0, grpc_port=port))


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("a..b", 0),  # cannot be a name
        ("a..b", 8001),
        ("192.0.2.1", 8001),  # nobody's address (RFC 5737)
    ],
)
def test_a_host_that_is_not_this_one_is_named(host: str, port: int) -> None:
    with pytest.raises(UnavailableError, match=rf"cannot listen on .{host}. .*set server\.host to"):
        refuse_taken_ports(config_at(host, port))


def test_a_taken_port_is_named_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{port} .*set server\.grpc_port"):
            refuse_taken_ports(config_at("127.0.0.1", port))
        with pytest.raises(UnavailableError, match=r"set server\.grpc_port"):
            refuse_taken_ports(config_at("localhost", port))
    refuse_taken_ports(config_at("127.0.0.1", 0))


def test_a_taken_http_port_is_named_unless_there_is_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerConfig(grpc_port=0, http_port=taken.getsockname()[1])
        with pytest.raises(UnavailableError, match=r"set server\.http_port"):
            refuse_taken_ports(Config(server=server))
        refuse_taken_ports(Config(server=server.model_copy(update={"http": False})))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_an_address_of_ipv6_is_tried_as_such() -> None:
    refuse_taken_ports(config_at("::1", 0))
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        config = config_at("::1", taken.getsockname()[1])
        with pytest.raises(UnavailableError, match=r"set server\.grpc_port"):
            refuse_taken_ports(config)
