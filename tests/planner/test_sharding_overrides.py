"""What users decide about operator splits is kept, and what they cannot decide is said."""

import pytest
import torch
from torch import nn

from outsize.errors import PlanError
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.planner.sharding import plan_sharding
from outsize.planner.sharding_overrides import ShardingOverrides, load_sharding_overrides


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(256, 1001)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def program() -> Program:
    return record_module(Blocks().to("meta"), torch.zeros(8, 63, 256), granularity="operators")


def plan(program: Program, degree: int = 2, never_split=(), **placements: str):
    named = {name.replace("__", "."): text for name, text in placements.items()}
    return plan_sharding(program, degree, overrides=ShardingOverrides(named, never_split))


def test_a_parameter_lies_where_the_user_says(program):
    """Rows first in all blocks, against what the search prefers, by one pattern with a star."""
    assert plan(program).parameters["blocks.0.0.weight"] == "S0"
    decided = plan_sharding(program, 2, overrides=ShardingOverrides({"blocks.*.0.weight": "S1"}))
    assert [decided.parameters[f"blocks.{index}.0.weight"] for index in range(3)] == ["S1"] * 3


def test_one_copy_of_a_block_may_differ_from_the_others(program):
    """A decision about the second block leaves the first and the third alike."""
    decided = plan_sharding(program, 2, overrides=ShardingOverrides({"blocks.1.0.weight": "R"}))
    assert "blocks.1.0.weight" not in decided.parameters
    assert decided.parameters["blocks.0.0.weight"] == decided.parameters["blocks.2.0.weight"] == "S0"


def test_what_is_never_to_be_split_stays_whole(program):
    """Neither its parameters nor its operators."""
    decided = plan(program, never_split=["head"])
    assert "head.weight" not in decided.parameters
    for node, choice in zip(program.nodes, decided.choices, strict=True):
        if node.module_path == "head" and choice >= 0:
            rule = decided.rules[choice]
            assert not any(text.startswith("S") for text in (*rule.inputs, *rule.outputs))
    assert any(name.startswith("head") for name in plan(program).parameters)


def test_a_dim_that_does_not_divide_is_cut_unevenly_where_the_user_says(program):
    """1,001 rows over two ranks are 501 and 500."""
    assert plan(program, head__weight="S0").parameters["head.weight"] == "S0[1001]"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"blocks.*.0.weight": "S0", "*.weight": "R"}, "More than one pattern matches blocks.0.0.weight"),
        ({"tail.*": "S0"}, "No parameter matches 'tail.\\*'"),
        ({"head.weight": "P"}, "'P' is no placement of a parameter"),
        ({"head.weight": "S2"}, "head.weight cannot be placed as S2"),
        ({"head.weight": "S0[1000]"}, "head.weight cannot be placed as S0\\[1000\\]"),
    ],
)
def test_what_cannot_be_decided_is_said(program, placements, message):
    """Two patterns for one name, none, no placement, and a dim that is not there."""
    with pytest.raises(PlanError, match=message):
        plan_sharding(program, 2, overrides=ShardingOverrides(placements))


def test_no_module_of_that_name_is_said(program):
    """A misspelt module would else be split after all."""
    with pytest.raises(PlanError, match="No module matches 'heads'"):
        plan(program, never_split=["heads"])


def test_overrides_are_read_from_a_file(tmp_path):
    """A table of placements and a list of modules; anything else in the file is a mistake."""
    path = tmp_path / "operators.toml"
    path.write_text('never_split = ["head"]\n[placements]\n"*.up.weight" = "S0"\n')
    assert load_sharding_overrides(path) == ShardingOverrides({"*.up.weight": "S0"}, ("head",))
    for text, message in (
        ("x", "is not TOML"),
        ("degree = 2", "unknown: degree"),
        ("never_split = 1", "text"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            load_sharding_overrides(path)
    with pytest.raises(PlanError, match="cannot be read"):
        load_sharding_overrides(tmp_path / "none.toml")
