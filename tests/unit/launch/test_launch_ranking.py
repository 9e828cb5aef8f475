# SPDX-License-Identifier: Apache-2.0
"""Which worker becomes which rank."""

from __future__ import annotations

import pytest

from raydist.errors import ConfigError
from raydist.launch.ranking import WorkerPlace, order_workers, rank_worlds


def _places(*places: tuple[str, int, tuple[str, ...]]) -> list[WorkerPlace]:
    return [WorkerPlace(node_id=node, bundle=bundle, gpu_ids=gpus) for node, bundle, gpus in places]


def test_ranks_on_a_node_follow_gpu_numbers_not_their_spelling() -> None:
    places = _places(*(("a", n, (gpu,)) for n, gpu in enumerate(("10", "9", "0", "2"))))
    assert [places[i].gpu_ids[0] for i in order_workers(places)] == ["0", "2", "9", "10"]


def test_ranks_are_contiguous_by_node_in_the_order_of_the_first_bundle() -> None:
    places = _places(("b", 0, ()), ("a", 1, ()), ("b", 2, ()), ("a", 3, ()))
    assert [places[i].node_id for i in order_workers(places)] == ["b", "b", "a", "a"]


def test_ranks_of_workers_that_share_a_bundle_follow_their_gpus() -> None:
    places = _places(("a", 0, ("3",)), ("a", 0, ("0",)), ("b", 1, ("2",)), ("b", 1, ("1",)))
    assert [places[i].gpu_ids[0] for i in order_workers(places)] == ["0", "3", "1", "2"]


def test_two_ranks_with_one_gpu_are_refused_by_gpu_and_node() -> None:
    with pytest.raises(ConfigError, match="GPU 1 of node a"):
        order_workers(_places(("a", 0, ("1",)), ("a", 1, ("1",)), ("b", 2, ("1",))))


def test_ranks_without_gpus_keep_the_order_of_their_bundles() -> None:
    assert order_workers(_places(("a", 2, ()), ("a", 0, ()), ("a", 1, ()))) == [1, 2, 0]


def test_worlds_of_two_ray_nodes_on_one_host_count_local_ranks_by_node_id() -> None:
    worlds = rank_worlds(["node-a", "node-a", "node-b", "node-b"])
    assert [w.rank for w in worlds] == [0, 1, 2, 3]
    assert [w.local_rank for w in worlds] == [0, 1, 0, 1]
    assert [w.node_rank for w in worlds] == [0, 0, 1, 1]
    assert {(w.world_size, w.num_nodes, w.local_world_size) for w in worlds} == {(4, 2, 2)}


def test_worlds_of_uneven_and_mixed_nodes_are_counted_as_they_come() -> None:
    worlds = rank_worlds(["b", "a", "b", "c", "b"])
    assert [(w.node_rank, w.local_rank, w.local_world_size) for w in worlds] == [
        (0, 0, 3), (1, 0, 1), (0, 1, 3), (2, 0, 1), (0, 2, 3),
    ]  # fmt: skip
    assert {w.num_nodes for w in worlds} == {3}


def test_worlds_of_one_rank_are_one_world() -> None:
    (world,) = rank_worlds(["only"])
    assert (world.world_size, world.num_nodes, world.local_world_size) == (1, 1, 1)
