"""Where all roles of a job meet: a store on the coordinator, one client for each thread that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from outsize.errors import LaunchError
from outsize.runtime.job_store import open_store
from outsize.runtime.parameter_server.lost import CoordinatorLostError

__all__ = ["Membership", "host_store"]

_JOB_KEY = "job"


@dataclass(frozen=True)
class Membership:
    """How to reach the store of a job. ``host`` is this process's own address, which others connect to."""

    address: str
    port: int
    job: str
    host: str = "127.0.0.1"

    def client(self, timeout_s: float = 180.0) -> TCPStore:
        """Return a new connection to the store, waiting for a coordinator that starts late.

        A client serves one call at a time, so a blocking wait must not share one: every thread has its own.

        Raises:
            LaunchError: nobody answers in time, or another job does.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(self.address, self.port, is_master=False, timeout=timeout)
            job = store.get(_JOB_KEY).decode()
        except RuntimeError as error:
            raise LaunchError(
                f"the coordinator at {self.address} port {self.port} does not answer",
                why=str(error).splitlines()[0],
                attempt="check that it runs and that this port is reachable",
            ) from None
        if job != self.job:
            raise LaunchError(
                f"the coordinator at {self.address} port {self.port} runs job {job!r}",
                why=f"this process belongs to job {self.job!r}",
                attempt="give every role the same job name and address",
            )
        return store


def host_store(
    job: str, address: str = "127.0.0.1", port: int = 0, own_address: str | None = None
) -> tuple[TCPStore, Membership]:
    """Start the store of a job on this address only; it lives as long as the returned object.

    Port 0 takes a free one. With ``own_address``, ``address`` may be a name that others know this machine by
    and that is no address of its own: then the store listens on all addresses.

    Raises:
        LaunchError: the address cannot be used.
    """
    store = open_store(address, port, or_everywhere=own_address is not None)
    store.set(_JOB_KEY, job)
    return store, Membership(address, store.port, job, own_address or address)


def wait_for(store: TCPStore, key: str, timeout_s: float) -> str:
    """Return a value of the store as soon as there is one.

    Raises:
        LaunchError: there is none in time.
        CoordinatorLostError: the store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return str(store.get(key).decode())
    except dist.DistNetworkError as error:
        raise CoordinatorLostError("coordinator", str(error).splitlines()[0]) from None
    except dist.DistStoreError:
        raise LaunchError(
            f"{key!r} did not appear in {timeout_s:g} s", why="a role has not started"
        ) from None
