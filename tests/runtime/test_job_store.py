"""Processes of a job agree on what the first of them decides, and nobody listens where it should not."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from outsize.errors import LaunchError, PlanError
from outsize.runtime.job_store import decide_together, open_store


def _client(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False)


def test_what_the_first_decides_is_told_to_the_others() -> None:
    """The second asks before there is an answer, and gets it."""
    store = open_store("127.0.0.1")
    heard: list[object] = []

    def listen() -> None:
        heard.append(decide_together(_client(store), is_first=False, decide=dict))

    listener = threading.Thread(target=listen)
    listener.start()
    decided = decide_together(store, is_first=True, decide=lambda: {"directory": "runs/0001"})
    listener.join(20)
    assert heard == [decided] == [{"directory": "runs/0001"}]


def test_an_error_of_the_first_is_everybodys() -> None:
    """The others do not wait for a plan that will never come: they raise the same error."""
    store = open_store("127.0.0.1")

    def decide() -> dict[str, object]:
        raise PlanError("No such mesh.", why="17 devices.", attempt="16.")

    with pytest.raises(PlanError, match="No such mesh"):
        decide_together(store, is_first=True, decide=decide)
    with pytest.raises(PlanError, match="No such mesh") as caught:
        decide_together(_client(store), is_first=False, decide=dict)
    assert (caught.value.why, caught.value.attempt) == ("17 devices.", "16.")


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    """Two jobs at one address do not mix."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1 port {port}"):
            open_store("127.0.0.1", port)
