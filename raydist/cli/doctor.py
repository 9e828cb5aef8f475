# SPDX-License-Identifier: Apache-2.0
"""`raydist doctor`: is this cluster, or this machine, fit to train?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from raydist.config import NetworkConfig
from raydist.doctor import render


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor:
    """Look at every node of the cluster that RAY_ADDRESS names, or at this machine.

    Compares software, GPUs, memory, limits and clocks, chooses the network as a run would, tries
    the storage from every node, and lets ranks talk on the real backend: collectives with known
    numbers, bandwidth of pairs and of all. Ends with 0 when fit to train, 1 when not, 2 when the
    question could not be asked.
    """

    storage: str | None = None
    """Directory or s3://bucket/prefix to try from every node."""
    read: tuple[str, ...] = ()
    """Files, folders or s3:// locations that every node must be able to read: a tokenizer, a
    model's configuration."""
    exclude: tuple[str, ...] = ()
    """Nodes to leave out, by name, address or Ray node id."""
    collectives: bool = True
    """Start ranks and let them talk; takes the GPUs, or a CPU of each node, for seconds."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """As in a run's configuration."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Run `raydist doctor`; the status says whether the nodes are fit."""
    options = tyro.cli(Doctor, args=list(arguments), prog="raydist doctor")
    from raydist.launch.doctor import DoctorRequest, examine_cluster  # Ray, after --help

    report = examine_cluster(
        DoctorRequest(
            storage=options.storage,
            readable=options.read,
            exclude=options.exclude,
            collectives=options.collectives,
            network=options.network,
        )
    )
    print(json.dumps(report.to_json_dict(), indent=1) if options.json else render(report))
    return report.exit_code
