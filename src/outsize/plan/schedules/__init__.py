"""Schedules by name: one generator a file, all behind ``make_schedule``."""

from outsize.plan.schedules.make import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule

__all__ = ["SCHEDULE_NAMES", "legal_microbatch_counts", "make_schedule"]
