"""Receives are posted early, each once, and never after their use."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action

from outsize.runtime.early_receives import post_receives_early


def actions(text: str) -> list[_Action]:
    return [_Action.from_str(word) for word in text.split()]


@pytest.mark.parametrize(
    ("lowered", "expected"),
    [
        (  # GPipe's last rank: the second transfer runs beside the first forward
            "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
            "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
        ),
        (  # 1F1B's first rank: the first gradient beside the last warm-up forward, each other one use ahead
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
            "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        ),
        (  # what is early already stays
            "1RECV_F0 1RECV_F1 1F0 1F1",
            "1RECV_F0 1RECV_F1 1F0 1F1",
        ),
        (  # a backward in two parts receives for its first part
            "0F0 0SEND_F0 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1",
            "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0I0 0W0 0I1 0W1",
        ),
    ],
)
def test_receives_move_one_use_ahead(lowered: str, expected: str) -> None:
    """Worked by hand; computations and sends keep their order."""
    assert post_receives_early(actions(lowered)) == actions(expected)
