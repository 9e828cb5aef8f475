# SPDX-License-Identifier: Apache-2.0
"""What a run would be, from its configuration alone: no cluster, no GPU, no torch, no write."""

from __future__ import annotations

from typing import Any

from raydist.config import to_json_dict
from raydist.config.cli import Request
from raydist.errors import ClusterError
from raydist.launch.cluster import cluster_address
from raydist.launch.preflight import batch_for, resolve_storage
from raydist.plan import advise, get_device, plan_memory, render_plan


def describe_request(request: Request) -> str:
    """Return the resolved configuration, batch arithmetic, placement, network and memory plan.

    Raises:
        ConfigError: What would also stop the run: a batch that does not divide, storage that
            is no location, an unknown device.
    """
    config = request.config
    scaling = config.scaling
    device = get_device(scaling.plan_device)
    workers = scaling.planned_workers or scaling.cpu_workers
    batch = batch_for(request, config, workers)
    why = "as configured" if scaling.planned_workers else "scaling.cpu_workers; a GPU each if any"
    each = "1 GPU" if not device.is_host else "CPUs only"
    if scaling.nodes:
        each += f", {scaling.gpus_per_node} on each of {scaling.nodes} nodes"
    plan = plan_memory(config, world_size=workers, device=device)
    sections = [
        f"recipe {request.recipe}, resolved:",
        *_lines(to_json_dict(config), indent=2),
        "",
        f"placement: {workers} ranks ({why}), {each}",
        f"batch: {batch.global_batch_size} sequences a step = {workers} ranks x "
        f"{batch.micro_batch_size} micro batch x {batch.gradient_accumulation_steps} accumulation"
        f" = {batch.global_batch_size * config.data.sequence_length:,} tokens a step, "
        f"{config.planned_tokens:,} in all",
        f"network: {config.network.interface or 'the interface of each node that carries its'} "
        f"{'on every node' if config.network.interface else 'cluster address'}, rendezvous on "
        f"rank 0's node, port {config.network.master_port or 'bound by rank 0'}",
        f"cluster: {_cluster()}",
        f"run: {resolve_storage(config.storage)}/{config.name}, resume {config.resume}",
        "",
        render_plan(plan, device=device, advice=advise(config, world_size=workers, device=device)),
    ]
    if request.ds_report is not None:
        sections += ["", request.ds_report.render()]
    return "\n".join(sections)


def _cluster() -> str:
    try:
        address = cluster_address()
    except ClusterError as error:
        return f"not usable: {error.problem}"
    return address or "one on this machine, for as long as the run lasts"


def _lines(tree: dict[str, Any], *, indent: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            lines += [f"{' ' * indent}{key}:", *_lines(value, indent=indent + 2)]
        else:
            lines.append(f"{' ' * indent}{key}: {value}")
    return lines
