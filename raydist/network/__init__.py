# SPDX-License-Identifier: Apache-2.0
"""The network between ranks: what each node has, which of it is used, and why."""

from raydist.network.candidates import CandidateNetwork, candidate_networks
from raydist.network.choice import choose_network
from raydist.network.decision import AS_SET, ONE_NODE, NetworkDecision, NetworkProbe, NodeChoice
from raydist.network.environment import ImpliedEnvironment, network_environment
from raydist.network.facts import Interface, NodeNetwork, RdmaDevice, RdmaKind
from raydist.network.inventory import inventory, routes

__all__ = [
    "AS_SET",
    "ONE_NODE",
    "CandidateNetwork",
    "ImpliedEnvironment",
    "Interface",
    "NetworkDecision",
    "NetworkProbe",
    "NodeChoice",
    "NodeNetwork",
    "RdmaDevice",
    "RdmaKind",
    "candidate_networks",
    "choose_network",
    "inventory",
    "network_environment",
    "routes",
]
