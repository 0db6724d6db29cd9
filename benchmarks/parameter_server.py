"""Push and pull of 50 MiB: outsize's parameter server against raw sockets, torch RPC and a Ray actor.

Every peer has one server and one worker in processes of their own on the loopback address, one thread each,
and does the same work: the gradient travels, plain SGD is applied, the parameters travel back. Peers take
turns in rounds; the figure is the median of the rounds' medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from outsize.runtime.parameter_server.client import ServerClient
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.layout import Variable, place_variables
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.server import Server
from outsize.runtime.parameter_server.settings import Settings
from outsize.runtime.parameter_server.update_policy import UpdatePolicy

NUM_ELEMENTS = (50 << 20) // 4
TABLE_ROWS, TABLE_WIDTH, ROWS_TOUCHED = 1_000_000, 64, 10_000
LEARNING_RATE = 0.1
_CONTEXT = multiprocessing.get_context("spawn")


class Peer:
    """A server and its workers in processes of their own, which measure when asked and else do nothing."""

    def __init__(self, server: Callable[..., None], worker: Callable[..., None], *given: Any) -> None:
        self._processes = [_CONTEXT.Process(target=server, args=given, daemon=True)]
        self._pipes: list[Connection] = []
        self._worker, self._given = worker, given
        self._processes[0].start()

    def add_worker(self, index: int = 0) -> None:
        mine, theirs = _CONTEXT.Pipe()
        self._processes.append(_CONTEXT.Process(target=self._worker, args=(theirs, index, *self._given)))
        self._pipes.append(mine)
        self._processes[-1].start()

    def measure(self, num_calls: int) -> list[float]:
        """Let all workers exchange at the same time; return the milliseconds of every call."""
        for pipe in self._pipes:
            pipe.send(num_calls)
        return [one for pipe in self._pipes for one in self._answer(pipe)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, pipe: Connection) -> list[float]:
        if not pipe.poll(120):
            raise TimeoutError("no answer in 120 s")
        times: list[float] = pipe.recv()
        return times


def serve(pipe: Connection, exchange: Callable[[], None]) -> None:
    """Measure as often as asked, after two calls that do not count."""
    exchange(), exchange()
    while True:
        pipe.send(measure(exchange, pipe.recv()))


def measure(exchange: Callable[[], None], num_calls: int) -> list[float]:
    times = []
    for _ in range(num_calls):
        started = time.perf_counter()
        exchange()
        times.append(1000 * (time.perf_counter() - started))
    return times


# outsize


def outsize_server(membership: Membership) -> None:
    torch.set_num_threads(1)
    Server(membership, 0).run()


def outsize_dense_worker(pipe: Connection, index: int, membership: Membership) -> None:
    torch.set_num_threads(1)
    client = ServerClient(membership, f"worker/{index}")
    client.gradients["weight"].fill_(1e-3)

    def exchange() -> None:
        client.push(client.gradients)
        client.pull(dense=True)

    serve(pipe, exchange)


def outsize_row_worker(pipe: Connection, index: int, membership: Membership) -> None:
    torch.set_num_threads(1)
    client = ServerClient(membership, f"worker/{index}")
    rows = torch.randperm(TABLE_ROWS)[:ROWS_TOUCHED]
    gradient = torch.ones(ROWS_TOUCHED, TABLE_WIDTH)

    def exchange() -> None:
        client.push(rows={"table": (rows, gradient)})
        client.pull({"table": rows}, dense=False)

    serve(pipe, exchange)


def start_outsize(variable: Variable, worker: Callable[..., None]) -> tuple[Coordinator, Peer]:
    settings = Settings(
        place_variables([variable], 1),
        OptimizerSettings("sgd", {"lr": LEARNING_RATE}),
        UpdatePolicy.asynchronous(),
    )
    coordinator = Coordinator("benchmark", settings)
    peer = Peer(outsize_server, worker, coordinator.membership)
    coordinator.initialise(lambda shard: torch.zeros(shard.shape))
    peer.add_worker()
    return coordinator, peer


# raw sockets: what the same exchange costs without any library


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.recv_into(view) :]


def socket_server(port: int) -> None:
    torch.set_num_threads(1)
    parameters, gradient = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
    listener = socket.create_server(("127.0.0.1", port))
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outgoing = memoryview(parameters.numpy()).cast("B")
    incoming = memoryview(gradient.numpy()).cast("B")
    command = bytearray(1)
    while True:
        _receive(connection, incoming)
        parameters.add_(gradient, alpha=-LEARNING_RATE)
        connection.sendall(b"a")
        _receive(connection, memoryview(command))
        connection.sendall(outgoing)


def socket_worker(pipe: Connection, _index: int, port: int) -> None:
    torch.set_num_threads(1)
    parameters, gradient = torch.zeros(NUM_ELEMENTS), torch.full((NUM_ELEMENTS,), 1e-3)
    connection = _dial(port)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    incoming = memoryview(parameters.numpy()).cast("B")
    outgoing = memoryview(gradient.numpy()).cast("B")
    answer = bytearray(1)

    def exchange() -> None:
        connection.sendall(outgoing)
        _receive(connection, memoryview(answer))
        connection.sendall(b"p")
        _receive(connection, incoming)

    serve(pipe, exchange)


def _dial(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# torch RPC

_RPC_PARAMETERS = torch.zeros(0)


def _rpc_push(gradient: torch.Tensor) -> None:
    _RPC_PARAMETERS.add_(gradient, alpha=-LEARNING_RATE)


def _rpc_pull() -> torch.Tensor:
    return _RPC_PARAMETERS


def _rpc_start(rank: int, port: int) -> Any:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _RPC_PARAMETERS.resize_(NUM_ELEMENTS).zero_()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RPC's own start-up code uses a deprecated call
        rpc.init_rpc(["server", "worker"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def rpc_server(port: int) -> None:
    _rpc_start(0, port)
    time.sleep(300)  # RPC serves in its own threads; this process is killed when the worker has measured


def rpc_worker(pipe: Connection, _index: int, port: int) -> None:
    rpc = _rpc_start(1, port)
    gradient = torch.full((NUM_ELEMENTS,), 1e-3)

    def exchange() -> None:
        rpc.rpc_sync("server", _rpc_push, args=(gradient,))
        rpc.rpc_sync("server", _rpc_pull)

    serve(pipe, exchange)


# Ray


class RayPeer:
    """A Ray actor as server; this process is its worker."""

    def __init__(self) -> None:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)

        @ray.remote
        class Actor:
            def __init__(self) -> None:
                torch.set_num_threads(1)
                self.parameters = torch.zeros(NUM_ELEMENTS)

            def push(self, gradient: torch.Tensor) -> None:
                self.parameters.add_(gradient, alpha=-LEARNING_RATE)

            def pull(self) -> torch.Tensor:
                return self.parameters

        self._ray, self._actor = ray, Actor.remote()
        self._gradient = torch.full((NUM_ELEMENTS,), 1e-3)

    def measure(self, num_calls: int) -> list[float]:
        return measure(self._exchange, num_calls)

    def stop(self) -> None:
        self._ray.shutdown()

    def _exchange(self) -> None:
        self._ray.get(self._actor.push.remote(self._gradient))
        self._ray.get(self._actor.pull.remote())


def start_peer(server: Callable[..., None], worker: Callable[..., None]) -> Peer:
    peer = Peer(server, worker, _free_port())
    peer.add_worker()
    return peer


def compare(peers: dict[str, Any], num_rounds: int, num_calls: int) -> dict[str, float]:
    """Let the peers take turns, so that what else the machine does hits all alike."""
    rounds: dict[str, list[list[float]]] = {name: [] for name in peers}
    for _ in range(num_rounds):
        for name, peer in peers.items():
            rounds[name].append(peer.measure(num_calls))
    result: dict[str, float] = {}
    for name, measured in rounds.items():
        middle = statistics.median(statistics.median(times) for times in measured)
        result |= {f"{name}_ms": round(middle, 2), f"{name}_best_ms": round(min(map(min, measured)), 2)}
        print(f"{name:12} {middle:7.1f} ms, best {result[f'{name}_best_ms']:7.1f} ms", flush=True)
    for name in peers:
        if name != "outsize":
            for kind in ("", "_best"):
                ratio = result[f"{name}{kind}_ms"] / result[f"outsize{kind}_ms"]
                result[f"speed_against_{name}{kind}"] = round(ratio, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=5)
    settings = parser.parse_args()
    result: dict[str, Any] = {"bytes": 4 * NUM_ELEMENTS, "not_run": {}}
    dense, outsize = start_outsize(Variable("weight", (NUM_ELEMENTS,)), outsize_dense_worker)
    peers: dict[str, Any] = {
        "raw_sockets": start_peer(socket_server, socket_worker),
        "outsize": outsize,
        "torch_rpc": start_peer(rpc_server, rpc_worker),
    }
    if importlib.util.find_spec("ray"):
        peers["ray_actor"] = RayPeer()
    else:
        result["not_run"]["ray_actor"] = "ray is not installed"
    result |= compare(peers, settings.rounds, settings.calls)
    for name in peers.keys() - {"outsize"}:
        peers[name].stop()
    for num_workers in (1, 2, 4):
        while len(outsize._pipes) < num_workers:
            outsize.add_worker(len(outsize._pipes))
        outsize.measure(1)  # until all have joined
        times = statistics.median(outsize.measure(4 * settings.calls))
        result[f"outsize_{num_workers}_workers_ms"] = round(times, 2)
        print(f"{num_workers} workers: {times:7.1f} ms each", flush=True)
    outsize.stop()
    table = Variable("table", (TABLE_ROWS, TABLE_WIDTH), row_wise=True)
    by_rows, peer = start_outsize(table, outsize_row_worker)
    result["outsize_rows_ms"] = round(statistics.median(peer.measure(4 * settings.calls)), 2)
    peer.stop()
    print(f"{ROWS_TOUCHED} of {TABLE_ROWS} rows of width {TABLE_WIDTH}: {result['outsize_rows_ms']} ms")
    for coordinator in (dense, by_rows):
        coordinator.stop()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
