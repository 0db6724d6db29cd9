"""Plans survive a round trip through JSON, and wrong files are refused by field."""

import json

import pytest

from helpers.profiles import chain_profile
from outsize.cluster.argument import parse_cluster
from outsize.errors import PlanError
from outsize.plan.files import load_plan, plan_from_json, plan_to_json, save_plan
from outsize.planner.search import plan_job


@pytest.fixture(scope="module")
def plan():
    return plan_job(chain_profile(), parse_cluster("4xcpu:100MiB", num_cores=2), global_batch=16).best


def test_a_saved_plan_loads_as_the_same_plan(plan, tmp_path) -> None:
    """Every field, nested ones included, comes back equal."""
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"global_batch": "many"}, "global_batch"),
        ({"mesh": {"pp": "x"}}, r"mesh.*pp"),
        ({"stages": None}, "stages"),
        ({"surprise": 1}, "surprise"),
        ({"skip_connections": "sent_directly"}, "skip_connections"),
        ({"batch_norm": "frozen"}, "batch_norm"),
    ],
)
def test_a_wrong_plan_is_refused_by_field(plan, change, part) -> None:
    """The message names the field that is wrong."""
    with pytest.raises(PlanError, match=part):
        plan_from_json({**plan_to_json(plan), **change})


@pytest.mark.parametrize(
    ("text", "part"), [("{", "not JSON"), ("[]", "not a plan"), (None, "cannot be read")]
)
def test_what_is_no_plan_is_refused(tmp_path, text, part) -> None:
    """Missing files, broken JSON and other JSON each give one message."""
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=part):
        load_plan(path)


def test_the_form_holds_plain_json_only(plan) -> None:
    """json.dumps needs no help."""
    assert json.loads(json.dumps(plan_to_json(plan)))["format_version"] == 1
