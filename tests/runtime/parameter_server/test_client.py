"""Pulls and pushes against servers in threads: versions, staleness, rows, push ids."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from helpers.parameter_servers import make_settings, servers_in_threads
from outsize.errors import TrainingError
from outsize.runtime.parameter_server.client import PushOutcome, ServerClient
from outsize.runtime.parameter_server.layout import Shard, Variable
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.partitioners import FixedPartitioner
from outsize.runtime.parameter_server.protocol import Kind
from outsize.runtime.parameter_server.update_policy import UpdatePolicy

pytestmark = pytest.mark.distributed

_ACCEPTED, _STALE, _REPEATED = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.REPEATED
_COUNTERS = [Variable("a", (2,), torch.float64), Variable("b", (3,), torch.float64)]
_MINUS_ONE = {"a": -torch.ones(2), "b": -torch.ones(3)}


def test_a_push_with_a_known_id_is_applied_once() -> None:
    """Sent three times by two workers, the same id raises both servers' counters by one."""
    with servers_in_threads(make_settings(_COUNTERS, num_servers=2)) as coordinator:
        clients = [ServerClient(coordinator.membership, f"worker/{index}") for index in range(2)]
        outcomes = [client.push(_MINUS_ONE, push_id=7) for client in (*clients, clients[0])]
        assert outcomes == [_ACCEPTED, _REPEATED, _REPEATED]
        assert coordinator.read_variable("a").tolist() == [1.0, 1.0]
        assert coordinator.read_variable("b").tolist() == [1.0, 1.0, 1.0]
        assert [one["num_repeated"] for one in coordinator.statistics()] == [2, 2]


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_stale_push_is_refused_by_all_servers_or_none(num_servers: int) -> None:
    """With bound 1, a push that read version 0 is refused at version 2, and a new pull makes it welcome."""
    policy = UpdatePolicy.bounded_staleness(1)
    with servers_in_threads(make_settings(_COUNTERS, num_servers=num_servers, policy=policy)) as coordinator:
        slow, quick = (ServerClient(coordinator.membership, f"worker/{index}") for index in range(2))
        slow.pull()
        for _ in range(2):
            quick.pull()
            assert quick.push(_MINUS_ONE) is _ACCEPTED
        assert slow.push(_MINUS_ONE) is _STALE
        slow.pull()
        assert slow.push(_MINUS_ONE) is _ACCEPTED
        assert coordinator.read_variable("a").tolist() == [3.0, 3.0]
        assert coordinator.read_variable("b").tolist() == [3.0, 3.0, 3.0]
        statistics = coordinator.statistics()
        assert statistics[0]["num_stale"] == 1
        assert [one["staleness"] for one in statistics] == [{0: 3}] * num_servers


def test_asynchronous_pushes_report_their_staleness() -> None:
    """Three workers read version 0 and push in turn: ages 0, 1 and 2."""
    with servers_in_threads(make_settings(_COUNTERS)) as coordinator:
        clients = [ServerClient(coordinator.membership, f"worker/{index}") for index in range(3)]
        for client in clients:
            client.pull()
        assert [client.push(_MINUS_ONE) for client in clients] == [_ACCEPTED] * 3
        assert coordinator.statistics()[0]["staleness"] == {0: 1, 1: 1, 2: 1}


def _train(client: ServerClient, worker: int, num_updates: int, log: list[tuple[int, int]]) -> None:
    while True:
        parameters = client.pull().parameters
        version = client.versions[0]
        assert set(client.versions) == {version}  # never a mixture of two versions
        if version == num_updates:
            return
        target = (worker + 1) * (version + 2)
        if client.push({name: value - target for name, value in parameters.items()}) is _ACCEPTED:
            log.append((version, target))


@pytest.mark.parametrize("num_backup_workers", [0, 1])
def test_synchronous_training_equals_sgd_on_the_summed_batch(num_backup_workers: int) -> None:
    """Three workers, two servers: replaying the accepted gradients version by version gives the same."""
    settings = make_settings(
        _COUNTERS,
        num_servers=2,
        optimizer=OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.5}),
        policy=UpdatePolicy.synchronous(3, num_backup_workers=num_backup_workers),
    )
    log: list[tuple[int, int]] = []
    with servers_in_threads(settings) as coordinator:
        threads = [
            threading.Thread(
                target=_train,
                args=(ServerClient(coordinator.membership, f"worker/{worker}"), worker, 5, log),
            )
            for worker in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        found = coordinator.read_variable("b")
        statistics = coordinator.statistics()
    reference = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([reference], lr=0.1, momentum=0.5)
    for version in range(5):
        targets = [target for read, target in log if read == version]
        assert len(targets) == 3 - num_backup_workers
        reference.grad = sum((reference.detach() - target for target in targets), torch.zeros(3).double())
        optimizer.step()
    torch.testing.assert_close(found, reference.detach(), rtol=0, atol=1e-12)
    assert all(set(one["staleness"]) == {0} for one in statistics)


def test_the_place_of_a_worker_that_dies_between_claim_and_push_is_given_away() -> None:
    """One of two needed pushes is promised and never comes; a backup that was refused takes its place."""
    settings = make_settings(
        _COUNTERS, num_servers=2, policy=UpdatePolicy.synchronous(3, num_backup_workers=1)
    )
    with servers_in_threads(settings) as coordinator:
        dying, first, backup = (ServerClient(coordinator.membership, f"worker/{index}") for index in range(3))
        for client in (dying, first, backup):
            client.pull()
        assert dying.claim(push_id=-1).kind == Kind.DONE
        assert first.push(_MINUS_ONE) is _ACCEPTED
        assert backup.push(_MINUS_ONE) is _STALE
        threading.Timer(0.1, dying.close).start()
        backup.pull()
        assert backup.push(_MINUS_ONE) is _ACCEPTED
        assert coordinator.read_variable("b").tolist() == [2.0, 2.0, 2.0]


def test_a_version_that_never_comes_is_an_error_with_its_reason() -> None:
    """One of two synchronous workers is missing: the pull ends after the time allowed and says so."""
    policy = UpdatePolicy.synchronous(2)
    with servers_in_threads(make_settings(_COUNTERS, policy=policy, version_wait_s=0.2)) as coordinator:
        client = ServerClient(coordinator.membership, "worker/0")
        client.pull()
        assert client.push(_MINUS_ONE) is _ACCEPTED
        with pytest.raises(TrainingError, match="1 of 2 pushes"):
            client.pull()


def _table_rows(shard: Shard) -> torch.Tensor:
    rows = torch.arange(shard.first_row, shard.first_row + shard.num_rows, dtype=torch.float64)
    return rows[:, None].expand(shard.shape)


def test_a_sharded_table_behaves_like_the_whole() -> None:
    """13 rows in 5 shards on 2 servers: gather, repeated rows, slices and row updates equal indexing."""
    table = Variable("table", (13, 2), torch.float64, row_wise=True)
    asked: list[int] = []

    def initial(shard: Shard) -> torch.Tensor:
        asked.append(shard.num_rows)
        return _table_rows(shard)

    settings = make_settings([table], num_servers=2, partitioner=FixedPartitioner(5))
    whole = torch.arange(13, dtype=torch.float64)[:, None].expand(13, 2).clone()
    with servers_in_threads(settings, initial) as coordinator:
        client = ServerClient(coordinator.membership, "worker/0")
        assert sorted(asked, reverse=True) == [3, 3, 3, 2, 2]  # never the whole table
        indices = torch.tensor([[12, 0, 7], [7, 7, 3]])
        torch.testing.assert_close(client.pull({"table": indices}).rows["table"], whole[indices])
        for rows in (slice(None), slice(None, None, -2), slice(-3, 1, -1), slice(4, 4)):
            expected = whole[list(range(*rows.indices(13)))]
            torch.testing.assert_close(client.read_rows("table", rows), expected)
        gradient = torch.arange(12, dtype=torch.float64).view(2, 3, 2)
        client.push(rows={"table": (indices, gradient)})
        whole.index_put_((indices,), -gradient, accumulate=True)
        torch.testing.assert_close(coordinator.read_variable("table"), whole)
        assert [one["version"] for one in coordinator.statistics()] == [1, 1]
        with pytest.raises(TrainingError, match="13 rows"):
            client.pull({"table": torch.tensor([13])})


def test_equal_rows_travel_once() -> None:
    """A batch of a thousand indices of three rows is a message of three rows."""
    table = Variable("table", (100, 4), torch.float64, row_wise=True)
    with servers_in_threads(make_settings([table])) as coordinator:
        client = ServerClient(coordinator.membership, "worker/0")
        indices = torch.arange(1000) % 3
        sent: list[int] = []
        begin = client._sessions[0].begin

        def counting(message: object) -> object:
            sent.append(sum(buffer.numel() for buffer in message.buffers))  # type: ignore[attr-defined]
            return begin(message)  # type: ignore[arg-type]

        client._sessions[0].begin = counting  # type: ignore[assignment,method-assign]
        client.push(rows={"table": (indices, torch.ones(1000, 4, dtype=torch.float64))})
        assert sent == [8 + 3 * 8 + 3 * 4 * 8]
        assert coordinator.read_variable("table")[:4, 0].tolist() == [-334.0, -333.0, -333.0, 0.0]


def test_dense_and_rows_make_one_update() -> None:
    """A model of a table and a dense layer pushes both at once; summed pushes keep rows apart."""
    variables = [
        Variable("dense", (2,), torch.float64),
        Variable("table", (6, 1), torch.float64, row_wise=True),
    ]
    settings = make_settings(
        variables, num_servers=2, partitioner=FixedPartitioner(2), policy=UpdatePolicy.synchronous(2)
    )
    with servers_in_threads(settings) as coordinator:
        clients = [ServerClient(coordinator.membership, f"worker/{index}") for index in range(2)]
        for client, rows in zip(clients, ([0, 5], [5, 2]), strict=True):
            client.pull()
            gradient = torch.ones(2, 1, dtype=torch.float64)
            client.push({"dense": torch.ones(2)}, {"table": (torch.tensor(rows), gradient)})
        assert coordinator.read_variable("dense").tolist() == [-2.0, -2.0]
        assert coordinator.read_variable("table").view(-1).tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, -2.0]


def test_a_reader_sees_one_version_while_updates_go_on() -> None:
    """2 MiB of equal numbers stay equal in every pull while another worker pushes."""
    variable = Variable("weight", (1 << 18,), torch.float64)
    with servers_in_threads(make_settings([variable])) as coordinator:
        reader, writer = (ServerClient(coordinator.membership, f"worker/{index}") for index in range(2))
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                writer.push({"weight": -torch.ones(1 << 18)})

        thread = threading.Thread(target=write)
        thread.start()
        try:
            deadline, seen = time.monotonic() + 10, set()
            while len(seen) < 5 and time.monotonic() < deadline:
                values = reader.pull().parameters["weight"]
                assert values.min() == values.max()
                seen.add(values[0].item())
        finally:
            stop.set()
            thread.join(10)
        assert len(seen) == 5
