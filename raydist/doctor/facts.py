# SPDX-License-Identifier: Apache-2.0
"""What a doctor knows of one node: plain data that crosses processes and becomes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

FolderPurpose = Literal["ray", "temporary", "home", "storage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One GPU as its driver describes it; None where the driver states nothing.

    Fields:
        index: The driver's, which is by PCI bus.
        memory_used_bytes: By all processes.
        num_uncorrected_errors: Memory errors that ECC could not correct since the driver started.
        slowdowns: Why its clocks are held down now, without what a busy GPU does by itself.
    """

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    compute_mode: str | None = None
    num_uncorrected_errors: int | None = None
    slowdowns: tuple[str, ...] = ()
    has_mig: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPair:
    """How two GPUs of a node reach each other.

    Fields:
        peer_access: nvidia-smi's word for reading each other's memory: OK, or why not.
        link: nvidia-smi's word for the path: NV and the number of links, PIX, PXB, PHB, NODE, SYS.
    """

    first: int
    second: int
    peer_access: str | None = None
    link: str | None = None

    @property
    def has_nvlink(self) -> bool:
        """Whether they are joined by NVLink."""
        return self.link is not None and self.link.startswith("NV")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """The filesystem below a folder that training writes to.

    Fields:
        free_bytes: What an ordinary user may still write.
        device: Equal for folders on one filesystem of the node.
    """

    purpose: FolderPurpose
    path: str
    total_bytes: int
    free_bytes: int
    device: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Host memory as a process of this node may use it.

    Fields:
        total_bytes: Of the machine.
        limit_bytes: What the control group allows, None where it allows all.
        available_bytes: What can be taken now without swapping and within the limit.
        shm_total_bytes: Size of /dev/shm, None where there is none.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """The machine's memory or the limit, whichever is lower."""
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitFacts:
    """What the system lets a process of this node have; None means without limit.

    Fields:
        can_lock_all: Whether the process is privileged to lock memory past the limit.
    """

    open_files_soft: int | None
    open_files_hard: int | None
    locked_memory_bytes: int | None
    processes: int | None
    can_lock_all: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFacts:
    """DeepSpeed's compiled ops on this node.

    Fields:
        built: Names of ops with a library that can be loaded.
        locks: Path of each lock file and its age in seconds; a builder removes its own.
    """

    folder: str
    built: tuple[str, ...] = ()
    locks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockOffset:
    """How far a node's clock is ahead of the asker's.

    Fields:
        offset_s: Positive when the node is ahead.
        round_trip_s: Time on the way; the offset is right within half of it.
    """

    offset_s: float
    round_trip_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFacts:
    """What a node could do with the run's storage.

    Fields:
        failed_step: What failed, None when nothing did.
        upload_bytes_per_s: Of one object, None when it was not measured.
        latency_s: Of reading a few bytes.
        unseen: Nodes whose objects this node does not find there.
    """

    url: str
    failed_step: str | None = None
    problem: str = ""
    way_out: str = ""
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    latency_s: float | None = None
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """All that is known of one node.

    Fields:
        node: Its name, for people; two Ray nodes on one host differ in node_id only.
        address: The address by which the cluster knows it.
        versions: Of software, by name; one that is missing has no entry.
        gpu_problem: Why the driver's tool did not describe the GPUs, empty when it did or there
            is none.
        num_cpus: CPUs that a process may use: affinity and control group.
        rdma_devices: InfiniBand, RoCE or EFA devices.
    """

    node: str
    node_id: str
    address: str
    versions: Mapping[str, str]
    memory: MemoryFacts
    limits: LimitFacts
    num_cpus: float
    load_1min: float
    gpus: tuple[GpuFacts, ...] = ()
    gpu_pairs: tuple[GpuPair, ...] = ()
    gpu_problem: str = ""
    folders: tuple[FolderFacts, ...] = ()
    ops: OpFacts | None = None
    rdma_devices: tuple[str, ...] = ()
    clock: ClockOffset | None = None
    storage: StorageFacts | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """Return the facts as JSON's own types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFacts:
    """One collective with known numbers, as one rank saw its result.

    Fields:
        num_elements: Of the larger side.
        is_right: None when the backend does not offer it.
        detail: What was wrong: the first wrong index, both values, the error.
    """

    name: str
    dtype: str
    num_elements: int
    is_right: bool | None
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRate:
    """Speed of all-reduce over all ranks.

    Fields:
        bus_bytes_per_s: Bus bandwidth, comparable between world sizes.
        latency_s: Median of all-reduces of one element.
    """

    num_bytes: int
    bus_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCollectives:
    """One rank's checks of the collectives that training relies on.

    Fields:
        node_id: Where the rank is.
        num_skipped: Checks that the time limit left out; the same on every rank.
    """

    rank: int
    node_id: str
    backend: str
    checks: tuple[CollectiveFacts, ...]
    all_reduce: AllReduceRate | None = None
    num_skipped: int = 0

    def to_json_dict(self) -> dict[str, Any]:
        """Return the checks as JSON's own types."""
        return asdict(self)
