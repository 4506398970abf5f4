"""Addresses of Ray clusters that cannot be joined; needs no Ray."""

from __future__ import annotations

import socket

import pytest

from jaxpar.errors import LaunchError
from jaxpar.parameter_server.ray_start import connect


def test_an_address_that_does_not_answer_is_reported_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(LaunchError) as error:
        connect(f"127.0.0.1:{port}", 1)
    assert str(error.value) == (
        f"no Ray cluster answers at 127.0.0.1:{port}: Connection refused. Remedy: the address of a running cluster "
        "(ray start --head), and RAY_AUTH_MODE=token if it requires a token; or leave the address out to start Ray on "
        "this machine."
    )
    with pytest.raises(LaunchError) as error:
        connect("nowhere", 1)
    assert str(error.value) == "the Ray address 'nowhere' is not HOST:PORT. Remedy: such as 10.0.0.1:6379."
