"""Host address that containers can reach, read from the Docker daemon's bridge settings."""

import socket

import pytest

from harbortrainer.sandbox import container_sockets
from harbortrainer.sandbox.docker_examination import DockerOutput


@pytest.mark.parametrize(
    ("bridge_settings", "expected"),
    [
        ("127.0.0.7 127.0.0.0/8", "127.0.0.7"),
        (" 127.0.0.0/8", "127.0.0.1"),
        ("192.0.2.77 192.0.2.0/24 127.0.0.0/8", "127.0.0.1"),
    ],
    ids=["gateway", "subnet only", "no address of this machine"],
)
async def test_host_address_comes_from_bridge_settings(
    monkeypatch: pytest.MonkeyPatch, bridge_settings: str, expected: str
):
    async def docker(*args: str) -> DockerOutput:
        assert args[:3] == ("network", "inspect", "bridge")
        return DockerOutput(0, bridge_settings.encode(), "")

    monkeypatch.setattr(container_sockets, "can_listen_inside", lambda: False)
    monkeypatch.setattr(container_sockets, "docker", docker)
    host, name = await container_sockets.host_address("docker")
    assert (host, name) == (expected, expected)
    socket.create_server((host, 0)).close()
