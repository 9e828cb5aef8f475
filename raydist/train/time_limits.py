# SPDX-License-Identifier: Apache-2.0
"""One time limit for every process group, whoever made it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raydist.errors import ClusterError


def hold_time_limits(timeout_s: float) -> int:
    """Give every process group of this process the one time limit, and read it back.

    DeepSpeed makes its groups without one, and they would get torch's default, half an hour for
    gloo: the default is changed too, for those that are made later. Uses what torch's own public
    calls are made of; there is no public way to list the groups or to set the default.

    Args:
        timeout_s: Of one collective.

    Returns:
        How many groups there are.

    Raises:
        ClusterError: A group kept another limit.
    """
    limit = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = limit
    if distributed_c10d.is_nccl_available():
        distributed_c10d.default_pg_nccl_timeout = limit  # pyright: ignore[reportPrivateImportUsage]
    groups = list(distributed_c10d._world.pg_map)
    for group in groups:
        distributed_c10d._set_pg_timeout(limit, group)
        kept = {name: s for name, s in _time_limits_s(group).items() if s != timeout_s}
        if kept:
            raise ClusterError(
                problem=f"Process group {distributed_c10d._world.pg_names[group]} keeps time "
                f"limits of {kept} instead of network.timeout_s={timeout_s:g}.",
                way_out="Report this with the torch version: its process groups have changed.",
            )
    return len(groups)


def _time_limits_s(group: dist.ProcessGroup) -> dict[str, float]:
    limits = {}
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device.type)), "options", None)
        if options is not None:
            limits[device.type] = options._timeout.total_seconds()
    return limits
