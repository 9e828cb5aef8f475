# SPDX-License-Identifier: Apache-2.0
"""Between torch tensors and the checkpoint's byte ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raydist.checkpoint.ranges import TensorSpec, WantedRange, partition

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRange:
    """A range this rank holds: ``tensor`` is a 1-D view of the live state, [length]."""

    spec: TensorSpec
    offset: int
    tensor: torch.Tensor

    @property
    def wanted(self) -> WantedRange:
        """The same range, as something to be read."""
        return WantedRange(spec=self.spec, offset=self.offset, length=self.tensor.numel())


def spec_of(key: str, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """Return the logical tensor that a checkpoint knows as ``key``."""
    return TensorSpec(key=key, shape=tuple(shape), dtype=_DTYPES[dtype])


def export_ranges(held: Sequence[HeldRange], buffers: dict[str, memoryview]) -> None:
    """Copy the live state into each range's buffer; done when this returns.

    On a GPU the copies run on a stream of their own, at full speed where the buffers are pinned.
    """
    on_device = [item for item in held if item.tensor.is_cuda and item.tensor.numel()]
    for item in held:
        if item.tensor.numel() and not item.tensor.is_cuda:
            _buffer_of(item, buffers).copy_(item.tensor.detach())
    if on_device:
        _export_from_device(on_device, buffers)


def _export_from_device(held: Sequence[HeldRange], buffers: dict[str, memoryview]) -> None:
    device = held[0].tensor.device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the update that is being saved
    with torch.cuda.stream(stream):
        for item in held:
            _buffer_of(item, buffers).copy_(item.tensor.detach(), non_blocking=True)
    stream.synchronize()  # The next step writes to the same tensors.


def _buffer_of(item: HeldRange, buffers: dict[str, memoryview]) -> torch.Tensor:
    return torch.frombuffer(buffers[item.spec.key], dtype=item.tensor.dtype)


def load_ranges(held: Sequence[HeldRange], buffers: Mapping[str, memoryview]) -> None:
    """Copy each range's buffer into the live state; a shorter one into its first elements."""
    for item in held:
        data = buffers[item.spec.key]
        if len(data):
            source = torch.frombuffer(data, dtype=item.tensor.dtype)
            item.tensor[: source.numel()].copy_(source)


def replica_slice(key: str, tensor: torch.Tensor) -> HeldRange:
    """Return the slice of a replicated tensor that this rank saves and reads.

    All ranks together hold each element once, so a save writes 1x and a restore reads 1x.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flat = tensor.detach().view(-1)
    offset, length = partition(flat.numel(), world_size=world_size, rank=rank)
    return HeldRange(
        spec=spec_of(key, tensor.shape, tensor.dtype),
        offset=offset,
        tensor=flat[offset : offset + length],
    )


def spread_replicas(tensors: Sequence[torch.Tensor]) -> None:
    """Fill each replicated tensor from the slices that ranks have just read. All ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        size = -(-flat.numel() // world_size)
        mine = torch.zeros(size, dtype=flat.dtype, device=flat.device)
        offset, length = partition(flat.numel(), world_size=world_size, rank=rank)
        mine[:length].copy_(flat[offset : offset + length])
        whole = torch.empty(size * world_size, dtype=flat.dtype, device=flat.device)
        dist.all_gather_into_tensor(whole, mine)
        flat.copy_(whole[: flat.numel()])


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over ranks. All ranks."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def pinned_memory(num_bytes: int) -> memoryview:
    """Return page-locked host memory, which a GPU writes to directly."""
    array: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(array)
