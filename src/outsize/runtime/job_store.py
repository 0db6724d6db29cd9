"""The store where the processes of a job meet, and what the first of them decides for all."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # not in its __all__

import outsize.errors
from outsize.errors import LaunchError, OutsizeError
from outsize.runtime.environment.launch_environment import LaunchEnvironment

__all__ = ["decide_together", "join_store", "open_store"]

_BACKLOG = 1024
_TIMEOUT = timedelta(minutes=10)
"""Machines start in any order, and the first process plans before the others hear of it."""


def open_store(address: str, port: int = 0, *, or_everywhere: bool = False) -> TCPStore:
    """Start a store that listens on ``address`` alone (left to itself, TCPStore listens on all addresses).

    Port 0 takes a free one. With ``or_everywhere`` an address that is not this machine's own, such as that of
    a service in front of it, is listened for on all addresses.

    Raises:
        LaunchError: the address or port cannot be used.
    """
    hosts = [address, ""] if or_everywhere else [address]
    for host in hosts:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            break
        except OSError as error:
            failure = error
    else:
        raise LaunchError(f"cannot listen on {address} port {port}", why=str(failure)) from None
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def join_store(environment: LaunchEnvironment) -> Store:
    """Start the job's store where this is its first process, else connect to it, waiting for a late start.

    torchrun may have started one already (it says so in ``TORCHELASTIC_USE_AGENT_STORE``).

    Raises:
        LaunchError: the store cannot be started, or nobody answers in time.
    """
    address, port = environment.master_address, environment.master_port
    if environment.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return open_store(address, port, or_everywhere=True)
    try:
        return TCPStore(address, port, is_master=False, timeout=_TIMEOUT)
    except (DistError, RuntimeError) as error:
        raise LaunchError(
            f"The first process of the job at {address} port {port} does not answer.",
            why=str(error).splitlines()[0],
            attempt="start the command of machine 0 too, and check that its port can be reached.",
        ) from None


def decide_together(store: Store, *, is_first: bool, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``decide`` says on the first process, everywhere; it is plain data.

    Raises:
        OutsizeError: what ``decide`` raised, on every process.
        LaunchError: nothing was decided in time.
    """
    key = f"outsize/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/decision"
    if not is_first:
        return _read(store, key)
    try:
        decision = decide()
    except OutsizeError as error:
        told = {"kind": type(error).__name__, "what": error.what, "why": error.why, "attempt": error.attempt}
        store.set(key, json.dumps({"error": told}))
        raise
    store.set(key, json.dumps({"decision": decision}))
    return decision


def _read(store: Store, key: str) -> dict[str, Any]:
    try:
        store.wait([key], _TIMEOUT)
        answer = json.loads(store.get(key))
    except DistError as error:
        raise LaunchError("The first process of the job ended.", why=str(error).splitlines()[0]) from None
    if "error" in answer:
        told = answer["error"]
        kind = getattr(outsize.errors, told["kind"], OutsizeError)
        raise kind(told["what"], why=told["why"], attempt=told["attempt"])
    decision: dict[str, Any] = answer["decision"]
    return decision
