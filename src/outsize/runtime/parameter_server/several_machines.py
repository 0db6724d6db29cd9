"""A training job whose processes something else started: one coordinates, the others ask it for the job."""

from __future__ import annotations

import json

from outsize.runtime.environment.interface import address_towards
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.membership import Membership, wait_for
from outsize.runtime.parameter_server.roles import ROLES
from outsize.runtime.parameter_server.run_job import PreparedJob, coordinate
from outsize.runtime.parameter_server.training import JobSummary

__all__ = ["coordinate_here", "join_server_job"]

_NAME, _JOB_KEY = "outsize", "training_job"
_START_TIMEOUT_S = 600.0  # machines start in any order, and the coordinator plans first


def coordinate_here(prepared: PreparedJob, address: str, port: int, own_address: str) -> JobSummary:
    """Coordinate the job. Others know this process by ``address``; here that is ``own_address``.

    Raises:
        LaunchError: the port cannot be used, or a role does not start in time.
        OutsizeError: what stopped the job.
    """
    settings = prepared.settings
    with Coordinator(_NAME, settings, address=address, port=port, own_address=own_address) as coordinator:
        coordinator.membership.client().set(_JOB_KEY, json.dumps(prepared.job.to_json()))
        return coordinate(prepared, coordinator)


def join_server_job(role: str, index: int, address: str, port: int) -> ParameterServerJob:
    """Be a role of the job that is coordinated at this address, until it ends; return the job.

    Raises:
        LaunchError: nobody coordinates there in time.
        CoordinatorLostError: the coordinator ended before the job did.
    """
    membership = Membership(address, port, _NAME, address_towards(address) or address)
    store = membership.client(_START_TIMEOUT_S)
    job = ParameterServerJob.from_json(json.loads(wait_for(store, _JOB_KEY, _START_TIMEOUT_S)))
    ROLES[role](job, membership, index)
    return job
