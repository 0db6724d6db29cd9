"""Remembers which pushes were applied, so that a repeated push is applied once."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["AppliedPushes"]


class AppliedPushes:
    """A set of push ids. Ids are handed out in order, so all but the newest few are one number: a watermark.

    ::

        0 1 2 3 4 5 | 6   [7]   8   [9]      watermark 6, newer {7, 9}
    """

    def __init__(self, watermark: int = 0, newer: Iterable[int] = ()) -> None:
        self.watermark, self.newer = watermark, set(newer)

    def __contains__(self, push_id: int) -> bool:
        return push_id < self.watermark or push_id in self.newer

    def add(self, push_id: int) -> None:
        """Remember an id; a negative one is not an id."""
        if push_id < self.watermark:
            return
        self.newer.add(push_id)
        while self.watermark in self.newer:
            self.newer.remove(self.watermark)
            self.watermark += 1
