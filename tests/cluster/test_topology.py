"""Where the members of a group lie."""

from outsize.cluster.argument import parse_cluster


def test_neighbours_share_a_machine_and_strided_groups_do_not() -> None:
    """On 4 machines of 8, tp=8 stays inside and dp=4 at stride 8 has one member a machine."""
    cluster = parse_cluster("4x8xH100")
    inside, across = cluster.span(1, 8), cluster.span(8, 4)
    assert (inside.per_machine, inside.num_machines, inside.across) == (8, 1, None)
    assert (across.per_machine, across.num_machines) == (1, 4)
    assert across.slowest is cluster.network


def test_a_group_larger_than_a_machine_is_split_evenly() -> None:
    """Stride 2, degree 16 on machines of 8 has 4 members on each of 4 machines."""
    span = parse_cluster("4x8xH100").span(2, 16)
    assert (span.per_machine, span.num_machines, span.degree) == (4, 4, 16)


def test_odd_groups_are_judged_by_the_worst_one() -> None:
    """Groups of 3 on two machines of 4 (6 devices used): the second group crosses the boundary."""
    assert parse_cluster("2x4xA10").span(1, 3, world_size=6).num_machines == 2


def test_unequal_machines_are_planned_by_the_weakest(tmp_path) -> None:
    """The weakest device has the least memory and the lowest rates of all."""
    path = tmp_path / "lab.toml"
    path.write_text(
        '[[machines]]\ndevices=[{kind="RTX4090", count=2}]\n[[machines]]\ndevices=[{kind="A10"}]\n'
    )
    cluster = parse_cluster(str(path))
    assert not cluster.is_uniform
    assert cluster.weakest_device().rate("bf16") == 125e12
    assert cluster.weakest_device(0, 2).kind == "RTX4090"
