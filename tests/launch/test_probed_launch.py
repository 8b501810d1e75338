"""Where a launch meets, read from its command and environment, and who listens there."""

import os
import socket

import pytest

from dtprof.launch.probed_launch import find_endpoint


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        ("torchrun --rdzv-endpoint=127.0.0.1:29401 t.py", {}, ("127.0.0.1", 29401)),
        ("torchrun --master_addr 127.0.0.1 --master_port 29402 t.py", {"MASTER_PORT": "1"}, ("127.0.0.1", 29402)),
        ("accelerate launch --main_process_ip 127.0.0.1 --main_process_port 29403 t.py", {}, ("127.0.0.1", 29403)),
        ("torchrun --master-port 29404 t.py", {}, ("localhost", 29404)),
        ("python t.py", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29405"}, ("127.0.0.1", 29405)),
        ("torchrun --rdzv-endpoint 127.0.0.1 t.py", {}, ("127.0.0.1", None)),
        ("torchrun --rdzv-endpoint 127.0.0.1:99999 t.py", {}, ("127.0.0.1", None)),
    ],
)
def test_the_endpoint_is_that_of_the_command_else_of_the_environment(
    line: str, environment: dict[str, str], expected: tuple[str, int | None]
) -> None:
    endpoint = find_endpoint(line.split(), environment)
    assert endpoint is not None
    assert (endpoint.host, endpoint.port, endpoint.is_local) == (*expected, True)


@pytest.mark.parametrize("line", ["torchrun --standalone t.py", "python t.py", "torchrun --rdzv-endpoint"])
def test_a_launch_that_chooses_its_own_address_has_no_endpoint(line: str) -> None:
    assert find_endpoint(line.split(), {}) is None


def test_a_port_that_is_taken_is_said_with_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = find_endpoint(["torchrun", "--master-port", str(port)], {})
    free = find_endpoint(["torchrun", "--master-port", str(port)], {})
    assert taken is not None
    assert free is not None
    assert taken.taken_by is not None
    assert str(os.getpid()) in taken.taken_by
    assert free.taken_by is None


def test_a_name_that_does_not_resolve_is_an_error_of_the_endpoint() -> None:
    endpoint = find_endpoint(["torchrun", "--rdzv-endpoint", "no-such-host.invalid:29400"], {})
    assert endpoint is not None
    assert endpoint.error
    assert endpoint.taken_by is None
