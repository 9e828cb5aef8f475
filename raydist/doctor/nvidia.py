# SPDX-License-Identifier: Apache-2.0
"""A node's NVIDIA GPUs, through the driver's own nvidia-smi: no CUDA is started.

The texts are taken apart by pure functions; ``read_gpus`` runs the program.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raydist.doctor.facts import GpuFacts, GpuPair

MIB = 1 << 20

_LIMIT_S = 15.0
"""Without persistence mode the driver is loaded first: 1 s for each GPU."""
_ESSENTIAL = (
    "index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_mode",
)  # fmt: skip
_HEALTH = ("ecc.errors.uncorrected.volatile.total", "mig.mode.current")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""One bit mask; drivers before 535 know the second name only."""
_NO_DEVICES, _NO_DRIVER = 6, 9
"""Exit status. Source: nvidia-smi(1), "Return value"."""
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "driver's thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
"""Source: nvml.h, nvmlClocksEventReason*. The power cap (0x04) is where any busy GPU is."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """What nvidia-smi said.

    Fields:
        problem: Why it did not describe the GPUs; empty when it did or there is none.
    """

    gpus: tuple[GpuFacts, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str | None = None
    problem: str = ""


def read_gpus(*, program: str | None = None) -> GpuReading:
    """Describe this machine's GPUs; a machine without any is no problem.

    Args:
        program: nvidia-smi, None for the one on PATH.
    """
    found = program or shutil.which("nvidia-smi")
    if found is None:
        if not has_driver():
            return GpuReading()
        return GpuReading(problem="the driver is loaded, and nvidia-smi is not on PATH")
    attempts = [(*_ESSENTIAL, *_HEALTH, reasons) for reasons in _REASONS] + [_ESSENTIAL]
    problem = ""
    for fields in attempts:
        query = f"--query-gpu={','.join(fields)}"
        code, text = _run(found, query, "--format=csv,noheader,nounits")
        if code == 0:
            gpus, driver = parse_gpus(text, fields)
            pairs = _read_pairs(found) if len(gpus) > 1 else ()
            return GpuReading(gpus=gpus, pairs=pairs, driver=driver)
        problem = problem or f"nvidia-smi: {' '.join(text.split())[:300] or f'exit {code}'}"
        if code != 2:  # an older driver does not know a field
            break
    if code in (_NO_DEVICES, _NO_DRIVER) and not has_device():
        return GpuReading()
    return GpuReading(problem=problem)


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded here."""
    return Path("/proc/driver/nvidia/version").exists()


def has_device(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA display or compute device is on the PCI bus, driver or not."""
    return any(
        _word(device / "vendor") == "0x10de" and _word(device / "class").startswith("0x03")
        for device in (pci.iterdir() if pci.is_dir() else ())
    )


def parse_gpus(text: str, fields: tuple[str, ...]) -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs and the driver's version from `--query-gpu --format=csv,noheader,nounits`.

    Args:
        text: One line for each GPU; a value the GPU does not state is in brackets.
        fields: What was asked for, in order.
    """
    gpus, driver = [], None
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(fields):
            continue
        row = dict(zip(fields, values, strict=True))
        driver = row["driver_version"]
        gpus.append(_gpu(row))
    return tuple(gpus), driver


def _gpu(row: Mapping[str, str]) -> GpuFacts:
    mask = next((_number(row[name]) for name in _REASONS if name in row), None) or 0
    mode = row["compute_mode"]
    return GpuFacts(
        index=int(row["index"]),
        uuid=row["uuid"],
        name=row["name"],
        memory_total_bytes=(_number(row["memory.total"]) or 0) * MIB,
        memory_used_bytes=(_number(row["memory.used"]) or 0) * MIB,
        compute_mode=None if mode.startswith("[") else mode,
        num_uncorrected_errors=_number(row.get(_HEALTH[0], "")),
        slowdowns=tuple(name for bit, name in _SLOWDOWNS.items() if mask & bit),
        has_mig=row.get(_HEALTH[1]) == "Enabled",
    )


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """Return what a matrix of `nvidia-smi topo` says of each pair of GPUs, lower index first."""
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and line[0] == "GPU0"), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for line in lines:
        if not line or line is header or not re.fullmatch(r"GPU\d+", line[0]):
            continue
        row = int(line[0][3:])
        for column, word in zip(columns, line[1:], strict=False):
            if row < column:
                found[row, column] = word
    return found


def _read_pairs(program: str) -> tuple[GpuPair, ...]:
    access_code, access_text = _run(program, "topo", "-p2p", "r")
    link_code, link_text = _run(program, "topo", "-m")
    access = parse_matrix(access_text) if access_code == 0 else {}
    links = parse_matrix(link_text) if link_code == 0 else {}
    return tuple(
        GpuPair(first=a, second=b, peer_access=access.get((a, b)), link=links.get((a, b)))
        for a, b in sorted(access | links)
    )


def _run(program: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status and what was said; 124 when the driver does not answer."""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {_LIMIT_S:g} s"
    except OSError as error:
        return 126, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
