# SPDX-License-Identifier: Apache-2.0
"""Ranks and their resources on a cluster. Made up: what the cluster has."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from raydist.config import ScalingConfig
from raydist.errors import CapacityError, ConfigError
from raydist.launch.cluster_view import ClusterView, NodeType, NodeView
from raydist.launch.placement import plan_placement


def _view(
    *, gpus: float = 0, cpus: float = 0, free_gpus: float | None = None,
    could_gpus: float | None = None, could_cpus: float | None = None, nodes: int = 1,
) -> ClusterView:  # fmt: skip
    def resources(gpu: float, cpu: float) -> dict[str, float]:
        return {name: value for name, value in (("GPU", gpu), ("CPU", cpu)) if value}

    return ClusterView(
        total=resources(gpus, cpus),
        free=resources(gpus if free_gpus is None else free_gpus, cpus),
        could_scale_to=resources(
            gpus if could_gpus is None else could_gpus, cpus if could_cpus is None else could_cpus
        ),
        nodes=[NodeView(resources=resources(gpus / nodes, cpus / nodes))] * nodes,
    )


def _nodes(*resources: dict[str, float]) -> list[NodeView]:
    return [
        NodeView(node_id=f"id{n}", name=f"n{n}", address=f"10.0.0.{n}", resources=amounts)
        for n, amounts in enumerate(resources, 1)
    ]


def _cluster(*resources: dict[str, float], node_types: list[NodeType] | None = None) -> ClusterView:
    total: Counter[str] = Counter()
    for amounts in resources:
        total.update(amounts)
    could = Counter(total)
    for kind in node_types or []:
        could.update({k: v * kind.max_count for k, v in kind.resources.items()})
    return ClusterView(
        total=total, free=total, could_scale_to=could, nodes=_nodes(*resources),
        node_types=node_types or [],
    )  # fmt: skip


def test_placement_of_2_workers_on_8_gpus_reserves_exactly_2() -> None:
    placement = plan_placement(ScalingConfig(workers=2), _view(gpus=8, cpus=64))
    assert placement.workers == 2
    assert placement.resources_per_worker == {"CPU": 7.0, "GPU": 1.0}
    assert placement.uses_gpus
    assert placement.describe() == "2 x [7 CPU, 1 GPU]"


@pytest.mark.parametrize(
    ("gpus", "cpus", "workers", "each"),
    [
        (8, 64, 8, 7.0),  # one of the node is left for others
        (8, 65, None, 8.0),
        (8, 64, 1, 7.0),  # one rank does not take the CPUs of eight
        (8, 60, 8, 7.0),
        (4, 4, 4, 1.0),
        (0, 16, 2, 8.0),
        (0, 16, 3, 5.0),
        (0, 2, 2, 1.0),
    ],
)
def test_placement_cpus_of_a_rank_follow_the_ratio(
    gpus: int, cpus: int, workers: int | None, each: float
) -> None:
    placement = plan_placement(ScalingConfig(workers=workers), _view(gpus=gpus, cpus=cpus))
    assert placement.resources_per_worker["CPU"] == each


def test_placement_cpus_that_are_configured_are_taken_as_they_are() -> None:
    scaling = ScalingConfig(workers=2, cpus_per_worker=0.5)
    assert plan_placement(scaling, _view(gpus=2, cpus=1)).resources_per_worker == {
        "CPU": 0.5,
        "GPU": 1.0,
    }


def test_placement_without_workers_takes_the_gpus_that_are_there_now() -> None:
    view = _view(gpus=4, cpus=32, could_gpus=16, could_cpus=128)
    assert plan_placement(ScalingConfig(), view).workers == 4


def test_placement_without_workers_on_a_cluster_still_empty_takes_what_can_come() -> None:
    view = _view(cpus=4, could_gpus=16, could_cpus=132)
    assert plan_placement(ScalingConfig(), view).workers == 16


def test_placement_of_workers_that_an_autoscaler_can_provide_is_accepted() -> None:
    view = _view(gpus=4, cpus=32, could_gpus=16, could_cpus=128)
    assert plan_placement(ScalingConfig(workers=16), view).workers == 16


def test_placement_of_busy_gpus_is_accepted_to_be_waited_for() -> None:
    view = _view(gpus=4, cpus=32, free_gpus=0)
    assert plan_placement(ScalingConfig(workers=4), view).workers == 4


def test_placement_on_nodes_x_gpus_per_node_has_their_product_of_ranks() -> None:
    scaling = ScalingConfig(nodes=2, gpus_per_node=4)
    placement = plan_placement(scaling, _view(gpus=16, cpus=128, nodes=2))
    assert placement.describe() == "8 x [7 CPU, 1 GPU], 4 on each of 2 nodes"
    assert placement.bundles == [{"CPU": 28.0, "GPU": 4.0}] * 2
    assert placement.strategy == "STRICT_SPREAD"
    assert [placement.bundle_of(worker) for worker in range(8)] == [0] * 4 + [1] * 4


def test_placement_of_workers_alone_has_a_bundle_each_packed() -> None:
    placement = plan_placement(ScalingConfig(workers=3), _view(gpus=8, cpus=64))
    assert placement.bundles == [{"CPU": 7.0, "GPU": 1.0}] * 3
    assert placement.strategy == "PACK"
    assert [placement.bundle_of(worker) for worker in range(3)] == [0, 1, 2]


def test_placement_of_cpu_ranks_over_nodes_puts_the_same_number_on_each() -> None:
    view = _cluster({"CPU": 8}, {"CPU": 8}, {"CPU": 4}, {"CPU": 2})
    placement = plan_placement(ScalingConfig(workers=6, nodes=3), view)
    assert placement.describe() == "6 x [2 CPU], 2 on each of 3 nodes"


def test_placement_on_more_nodes_than_have_the_gpus_is_refused_with_the_count() -> None:
    # 16 GPUs in all, but 8 on one node: two nodes of 8 there are not.
    view = _cluster({"GPU": 8, "CPU": 64}, {"GPU": 4, "CPU": 64}, {"GPU": 4, "CPU": 64})
    with pytest.raises(CapacityError) as caught:
        plan_placement(ScalingConfig(nodes=2, gpus_per_node=8), view)
    assert str(caught.value) == (
        "The run asks for 2 nodes with [56 CPU, 8 GPU] each; the cluster has 1 free and could "
        "scale to 1.\n"
        "  Lower scaling.nodes=2 or the 8 ranks on each or scaling.cpus_per_worker=7, or add nodes."
    )


def test_placement_on_nodes_that_the_autoscaler_can_add_is_accepted_up_to_its_limit() -> None:
    kinds = [NodeType(resources={"GPU": 8, "CPU": 64}, max_count=3)]
    view = _cluster({"CPU": 4}, node_types=kinds)
    accepted = plan_placement(ScalingConfig(nodes=3, gpus_per_node=8, cpus_per_worker=7), view)
    assert accepted.workers == 24
    with pytest.raises(CapacityError):
        plan_placement(ScalingConfig(nodes=4, gpus_per_node=8, cpus_per_worker=7), view)


def test_placement_of_bundles_that_no_node_type_can_hold_is_refused_although_sums_suffice() -> None:
    kinds = [NodeType(resources={"GPU": 4, "CPU": 32}, max_count=8)]
    with pytest.raises(CapacityError, match="nodes with"):
        plan_placement(
            ScalingConfig(nodes=2, gpus_per_node=8), _cluster({"CPU": 4}, node_types=kinds)
        )


def test_placement_leaves_out_excluded_nodes_by_name_address_or_id() -> None:
    view = _cluster({"GPU": 8, "CPU": 64}, {"GPU": 8, "CPU": 64}, {"GPU": 8, "CPU": 64})
    for name in ("n2", "10.0.0.2", "id2"):
        placement = plan_placement(ScalingConfig(exclude_nodes=(name,)), view)
        assert placement.workers == 16
        assert placement.labels == {"ray.io/node-id": "!in(id2)"}
    with pytest.raises(CapacityError):
        plan_placement(ScalingConfig(workers=24, exclude_nodes=("n2",)), view)


def test_placement_excluding_a_node_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=re.escape("n1 (10.0.0.1), n2 (10.0.0.2)")):
        plan_placement(ScalingConfig(exclude_nodes=("n7",)), _cluster({"CPU": 8}, {"CPU": 8}))


def test_placement_hands_labels_and_accelerator_type_to_every_bundle() -> None:
    node = NodeView(
        node_id="id1", name="n1", address="10.0.0.1", labels={"market-type": "spot"},
        resources={"GPU": 8, "CPU": 64, "accelerator_type:H100": 1},
    )  # fmt: skip
    view = replace(_cluster(dict(node.resources)), nodes=[node])
    scaling = ScalingConfig(accelerator_type="H100", labels={"market-type": "spot"})
    assert plan_placement(scaling, view).labels == {
        "market-type": "spot",
        "ray.io/accelerator-type": "H100",
    }


def test_placement_counts_only_nodes_that_match_the_labels() -> None:
    view = _cluster({"GPU": 8, "CPU": 64}, {"GPU": 8, "CPU": 64})
    first, second = view.nodes
    view = replace(view, nodes=[replace(first, labels={"market-type": "spot"}), second])
    spot = ScalingConfig(labels={"market-type": "spot"})
    assert plan_placement(spot, view).workers == 8
    with pytest.raises(CapacityError):
        plan_placement(replace(spot, workers=16), view)
    with pytest.raises(ConfigError, match=r"No node matches scaling\.labels"):
        plan_placement(ScalingConfig(labels={"market-type": "on-demand"}), view)


def test_placement_of_more_ranks_than_there_are_gpus_of_a_type_is_refused() -> None:
    view = _cluster(
        {"GPU": 4, "CPU": 64, "accelerator_type:H100": 1},
        {"GPU": 8, "CPU": 64, "accelerator_type:A100": 1},
    )
    with pytest.raises(CapacityError, match="8 GPU"):
        plan_placement(ScalingConfig(accelerator_type="H100", workers=8), view)


def test_placement_without_gpus_takes_cpu_workers() -> None:
    placement = plan_placement(ScalingConfig(), _view(cpus=8))
    assert placement.describe() == "2 x [4 CPU]"
    assert not placement.uses_gpus
    assert plan_placement(ScalingConfig(cpu_workers=4), _view(cpus=8)).workers == 4


def test_placement_of_too_many_gpus_says_asked_free_and_could_scale_to() -> None:
    view = _view(gpus=8, cpus=64, free_gpus=6, could_gpus=12)
    with pytest.raises(CapacityError) as caught:
        plan_placement(ScalingConfig(workers=16), view)
    assert str(caught.value) == (
        "The run asks for 16 GPU; the cluster has 6 free and could scale to 12.\n"
        "  Lower scaling.workers=16, or add nodes."
    )
    error = caught.value
    assert (error.resource, error.asked, error.free, error.could_scale_to) == ("GPU", 16, 6, 12)


def test_placement_of_too_many_cpus_says_which_keys_to_lower() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_placement(ScalingConfig(workers=4, cpus_per_worker=8), _view(gpus=4, cpus=16))
    assert str(caught.value) == (
        "The run asks for 32 CPU; the cluster has 16 free and could scale to 16.\n"
        "  Lower scaling.workers=4 or scaling.cpus_per_worker=8, or add nodes."
    )


def test_placement_of_two_ranks_on_one_cpu_is_refused() -> None:
    with pytest.raises(CapacityError, match="asks for 2 CPU; the cluster has 1 free"):
        plan_placement(ScalingConfig(), _view(cpus=1))


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        (ScalingConfig(nodes=2, gpus_per_node=8), "scaling.gpus_per_node=8"),
        (ScalingConfig(accelerator_type="H100"), "scaling.accelerator_type=H100"),
    ],
)
def test_placement_of_gpus_on_a_cluster_without_any_is_refused_by_key(
    scaling: ScalingConfig, what: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{what}, and the cluster has no GPU")):
        plan_placement(scaling, _view(cpus=64))


def test_placement_cpus_of_a_rank_are_not_those_of_a_head_without_gpus() -> None:
    view = ClusterView(
        total={"GPU": 8, "CPU": 72}, free={}, could_scale_to={"GPU": 8, "CPU": 72},
        nodes=_nodes({"CPU": 64}, {"GPU": 8, "CPU": 8}),
    )  # fmt: skip
    assert plan_placement(ScalingConfig(), view).resources_per_worker == {"CPU": 1, "GPU": 1}


def test_placement_of_an_accelerator_type_counts_its_gpus_alone() -> None:
    nodes = _nodes({"GPU": 8, "CPU": 64, "accelerator_type:H100": 1}, {"GPU": 4, "CPU": 64})
    total = {"GPU": 12, "CPU": 128}
    view = ClusterView(total=total, free=total, could_scale_to=total, nodes=nodes)
    assert plan_placement(ScalingConfig(accelerator_type="H100"), view).workers == 8
    assert plan_placement(ScalingConfig(), view).workers == 12


def test_placement_cpus_of_cpu_ranks_fit_node_by_node() -> None:
    nodes = _nodes({"CPU": 8}, {"CPU": 8})
    total = {"CPU": 16}
    view = ClusterView(total=total, free=total, could_scale_to=total, nodes=nodes)
    # 16 / 3 = 5 each would place one rank a node, and the third nowhere.
    assert plan_placement(ScalingConfig(workers=3), view).resources_per_worker == {"CPU": 4}
    with pytest.raises(CapacityError, match=r"Only 2 of 3 x \[5 CPU\] fit the nodes"):
        plan_placement(ScalingConfig(workers=3, cpus_per_worker=5), view)


def test_placement_cpus_of_cpu_ranks_are_those_that_are_there_not_those_that_could_come() -> None:
    view = ClusterView(
        total={"CPU": 8}, free={"CPU": 8}, could_scale_to={"CPU": 1000}, nodes=_nodes({"CPU": 8})
    )
    assert plan_placement(ScalingConfig(workers=2), view).resources_per_worker == {"CPU": 4}


def test_placement_of_an_accelerator_type_that_is_not_there_names_those_that_are() -> None:
    total = {"GPU": 8, "CPU": 64}
    view = ClusterView(
        total=total, free=total, could_scale_to=total,
        nodes=_nodes({"GPU": 8, "CPU": 64, "accelerator_type:A100": 1}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="there are A100"):
        plan_placement(ScalingConfig(accelerator_type="H100"), view)
