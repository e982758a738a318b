"""Requests to an environment server on another machine end when the server does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
import zmq
import zmq.asyncio
from verifiers.v1.serve import EnvClient

from harbortrainer.engines.env_server import remote_server
from harbortrainer.engines.env_server.remote_server import RemoteServer, ServerLostError


@contextlib.asynccontextmanager
async def peer(port: int = 0) -> AsyncGenerator[zmq.asyncio.Socket]:
    """A server that accepts requests and answers none."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def address_of(socket: zmq.asyncio.Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncGenerator[tuple[EnvClient, RemoteServer]]:
    client = EnvClient(address=address)
    server = RemoteServer("far", client)
    try:
        yield client, server
    finally:
        await server.close()
        await client.close()


async def test_requests_end_when_the_connection_breaks() -> None:
    async with peer() as first:
        address = address_of(first)
        async with connected(address) as (client, server):
            request = asyncio.create_task(server.guard(client.health(timeout=600)))
            await first.recv_multipart()
            first.close(linger=0)
            with pytest.raises(ServerLostError, match=f"the environment server at {address} was lost"):
                await asyncio.wait_for(request, 30)
            assert server.alive, "it may be started again"


async def test_requests_after_a_restart_reach_the_new_server() -> None:
    async with peer() as first:
        address = address_of(first)
        async with connected(address) as (client, server):
            lost = asyncio.create_task(server.guard(client.health(timeout=600)))
            await first.recv_multipart()
            first.close(linger=0)
            with pytest.raises(ServerLostError):
                await asyncio.wait_for(lost, 30)
            async with peer(int(address.rpartition(":")[2])) as second:
                again = asyncio.create_task(server.guard(client.health(timeout=600)))
                assert await asyncio.wait_for(second.recv_multipart(), 30)
                again.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await again


async def test_silent_server_ends_requests_and_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "CHECK_S", 0.05)
    monkeypatch.setattr(remote_server, "SILENT_S", 0.3)
    async with peer() as silent, connected(address_of(silent)) as (client, server):
        with pytest.raises(ServerLostError):
            await asyncio.wait_for(server.guard(client.health(timeout=600)), 30)
        assert not server.alive
        assert "environment server of 'far' at tcp://127.0.0.1:" in str(server.exit_error())
