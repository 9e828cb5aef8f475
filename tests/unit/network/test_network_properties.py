# SPDX-License-Identifier: Apache-2.0
"""What holds for every choice. Made up: clusters, by hypothesis."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from network_machines import DOCKER, LO, VIRBR, nic

from raydist.errors import ClusterError, RaydistError
from raydist.network import (
    Interface,
    NetworkDecision,
    NetworkProbe,
    NodeNetwork,
    candidate_networks,
    choose_network,
)

_NAMES = ("eth0", "eth1", "ens5", "ib0", "bond0", "wlp2s0", "tun0", "br0", "cni0", "docker0")


@st.composite
def _cards(draw: st.DrawFn, host: int) -> list[Interface]:
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True))
    return [
        nic(
            name,
            *(
                f"10.{draw(st.integers(0, 3))}.0.{host}/24"
                if draw(st.booleans())
                else f"fd00:{draw(st.integers(0, 2))}::{host}/64"
                for _ in range(draw(st.integers(0, 2)))
            ),
            mbps=draw(st.sampled_from([None, 1000, 1400, 25_000])),
            is_up=draw(st.sampled_from([True, True, True, False])),
        )
        for name in names
    ]


@st.composite
def _clusters(draw: st.DrawFn) -> list[NodeNetwork]:
    nodes = []
    for host in range(1, draw(st.integers(2, 4)) + 1):
        main = nic(draw(st.sampled_from(["eth0", "eno1"])), f"10.9.0.{host}/24", mbps=1000)
        common = nic("ens6", f"10.8.0.{host}/24", mbps=draw(st.sampled_from([None, 100, 10_000])))
        extra = draw(st.sampled_from([[], [common], [common, VIRBR], [DOCKER]]))
        cards = [LO, *draw(_cards(host)), *extra, main]
        cards = list({card.name: card for card in cards}.values())
        addresses = [main.ips[0]] * 30 + [ip for card in cards for ip in card.ips]
        names = [card.name for card in cards if card.addresses]
        preset = draw(st.sampled_from([""] * 12 + [main.name, "ens6", *names, "^lo"]))
        nccl = draw(st.sampled_from([""] * 6 + ["^docker,lo", "=eth0", "e,i,b"]))
        nodes.append(
            NodeNetwork(
                node=f"n{host}",
                node_id=f"id-{host}",
                address=draw(st.sampled_from(addresses)),
                interfaces=tuple(cards),
                environment={"GLOO_SOCKET_IFNAME": preset, "NCCL_SOCKET_IFNAME": nccl},
            )
        )
    routed = draw(st.booleans())
    peers = [ip for n in nodes for i in n.interfaces for ip in i.ips]
    return [
        replace(n, sources={p: draw(st.sampled_from(_own(n))) for p in peers} if routed else {})
        for n in nodes
    ]


def _own(node: NodeNetwork) -> list[str]:
    return [ip for i in node.interfaces for ip in i.ips]


@st.composite
def _probed(draw: st.DrawFn) -> tuple[list[NodeNetwork], list[NetworkProbe]]:
    nodes = draw(_clusters())
    pairs = [(a.node_id, b.node_id) for a in nodes for b in nodes if a is not b]
    probes = [
        NetworkProbe(
            label=candidate.label,
            unreachable=tuple(draw(st.sampled_from([[], [], pairs[:1], pairs]))),
            slowest_mbps=draw(st.sampled_from([None, 96.0, 100.0, 150.0, 9400.0])),
        )
        for candidate in candidate_networks(nodes)
        if draw(st.booleans())
    ]
    return nodes, probes


def _decide(nodes: list[NodeNetwork], probes: list[NetworkProbe]) -> NetworkDecision | RaydistError:
    try:
        return choose_network(nodes, probes=probes)
    except RaydistError as error:
        return error


def _comparable(decision: NetworkDecision | RaydistError) -> object:
    return decision if isinstance(decision, NetworkDecision) else (type(decision), str(decision))


@settings(deadline=None, database=None)
@given(_probed())
def test_choice_is_a_live_interface_with_its_address_and_never_loopback_or_containers(
    cluster: tuple[list[NodeNetwork], list[NetworkProbe]],
) -> None:
    nodes, probes = cluster
    decision = _decide(nodes, probes)
    if not isinstance(decision, NetworkDecision):
        return
    assert set(decision.by_node) == {n.node_id for n in nodes}
    addresses = [c.address for c in decision.by_node.values()]
    assert len(set(addresses)) == len(addresses)
    for node in nodes:
        choice = decision.by_node[node.node_id]
        card = node.interface(choice.interface)
        assert card is not None
        assert card.own(choice.address) == choice.address
        assert card.is_up
        assert not card.is_loopback
        assert card.kind != "container"


@settings(deadline=None, database=None)
@given(_probed(), st.randoms(use_true_random=False))
def test_choice_is_the_same_in_any_order(
    cluster: tuple[list[NodeNetwork], list[NetworkProbe]], order: random.Random
) -> None:
    nodes, probes = cluster
    mixed = [
        replace(n, interfaces=tuple(order.sample(n.interfaces, len(n.interfaces)))) for n in nodes
    ]
    order.shuffle(mixed)
    again = order.sample(probes, len(probes))
    assert _comparable(_decide(mixed, again)) == _comparable(_decide(nodes, probes))
    assert candidate_networks(mixed) == candidate_networks(nodes)


@settings(deadline=None, database=None)
@given(_clusters())
def test_candidates_have_a_label_and_interfaces_of_their_own(nodes: list[NodeNetwork]) -> None:
    found = candidate_networks(nodes)
    assert len({c.label for c in found}) == len(found)
    assert len({tuple(c.interfaces.items()) for c in found}) == len(found)


@settings(deadline=None, database=None)
@given(_probed())
def test_preset_is_kept_wherever_there_is_a_choice(
    cluster: tuple[list[NodeNetwork], list[NetworkProbe]],
) -> None:
    nodes, probes = cluster
    decision = _decide(nodes, probes)
    if not isinstance(decision, NetworkDecision):
        return
    for node in nodes:
        if preset := node.environment["GLOO_SOCKET_IFNAME"]:
            assert decision.by_node[node.node_id].interface == preset
            assert decision.by_node[node.node_id].source == "kept from GLOO_SOCKET_IFNAME"


@settings(deadline=None, database=None)
@given(_probed())
def test_network_with_a_broken_pair_is_never_taken(
    cluster: tuple[list[NodeNetwork], list[NetworkProbe]],
) -> None:
    nodes, probes = cluster
    decision = _decide(nodes, probes)
    broken = {p.label for p in probes if p.unreachable}
    assert not isinstance(decision, NetworkDecision) or decision.label not in broken


@settings(deadline=None, database=None)
@given(_probed())
def test_refusal_says_what_is_wrong_and_the_way_out(
    cluster: tuple[list[NodeNetwork], list[NetworkProbe]],
) -> None:
    decision = _decide(*cluster)
    if isinstance(decision, RaydistError):
        assert isinstance(decision, ClusterError)
        assert any(n.node in decision.problem for n in cluster[0]) or "share no" in decision.problem
        assert decision.way_out
