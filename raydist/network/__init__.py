# SPDX-License-Identifier: Apache-2.0
"""The network between ranks: chosen per node, with the reason."""

from raydist.network.choice import (
    Interface,
    NetworkChoice,
    choose_interface,
    list_interfaces,
    network_environment,
)

__all__ = [
    "Interface",
    "NetworkChoice",
    "choose_interface",
    "list_interfaces",
    "network_environment",
]
