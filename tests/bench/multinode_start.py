# SPDX-License-Identifier: Apache-2.0
"""What the preflight costs on four nodes, how soon faults are named, and which wire carries what.

    python tests/bench/multinode_start.py [preflight] [faults] [wires] [--pairs 3]

preflight: command to first optimizer step with the preflight, against without, on four nodes.
faults:    command to the line or error that names the node, on three nodes.
wires:     bytes on each interface during twenty steps of the default model.

Needs root on Linux: the nodes are a local cluster (raydist.testing.local_cluster).
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "multinode")]

from node_jobs import NodeJobs  # noqa: E402

from raydist.testing.local_cluster import LocalCluster  # noqa: E402


@contextmanager
def _jobs(cluster: LocalCluster) -> Iterator[NodeJobs]:
    with tempfile.TemporaryDirectory() as folder:
        yield NodeJobs(Path(folder), cluster.node(1))


def _spread(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def _arguments(num_nodes: int, *more: str) -> list[str]:
    return [
        "--scaling.nodes", str(num_nodes), "--scaling.workers", str(num_nodes),
        "--batch.global-batch-size", str(4 * num_nodes), *more,
    ]  # fmt: skip


def bench_preflight(pairs: int) -> None:
    """Starts in the order A B B A; the preflight's own line is read besides."""
    said: list[float] = []
    differences: list[float] = []
    with LocalCluster(4) as cluster, _jobs(cluster) as jobs:

        def start(name: str, *more: str) -> float:
            begun = time.monotonic()
            arguments = _arguments(4, "--name", name, "--num-steps", "2", *more)
            with jobs.started(*arguments) as process:
                process.wait_until(lambda: jobs.last_step(name) >= 1, "step 1")
                took = time.monotonic() - begun
                done = process.wait(120)
            if done.exit_code != 0:
                raise SystemExit(str(done))
            said.extend(map(float, re.findall(r"nodes tried in ([\d.]+) s", done.stdout)))
            return took

        start("warm-up")
        said.clear()
        for pair in range(pairs):
            sides: list[tuple[str, ...]] = [(), ("--scaling.no-preflight",)]
            took = {}
            for side in sides if pair % 2 == 0 else sides[::-1]:
                took[side] = start(f"pair-{pair}-{len(side)}", *side)
            differences.append(took[()] - took["--scaling.no-preflight",])
            print(f"pair {pair + 1}: with {took[()]:.2f} s, difference {differences[-1]:+.2f} s")
    print(f"preflight, as it says itself: {_spread(said, ' s')}")
    print(f"start with it minus start without: {_spread(differences, ' s')}")


def bench_faults(pairs: int) -> None:
    """Each fault once a pair: until the run's output names the node."""
    with LocalCluster(3) as cluster, _jobs(cluster) as jobs:
        host = cluster.node(3).plan.host
        data = [link.interface for n in cluster.nodes if (link := n.plan.find_link("data"))]
        named = [w for n, i in zip(cluster.nodes, data, strict=True) for w in (n.plan.host, i)]
        once = ("--fault.max-worker-failures", "0")
        faults: dict[str, tuple[Callable[[], None], list[str]]] = {
            "data link cut, interface looks healthy": (
                lambda: cluster.cut_link(3, network="data", has_carrier=True), [],
            ),
            "data link down": (lambda: cluster.cut_link(3, network="data"), []),
            "named interface whose link is cut": (
                lambda: cluster.cut_link(3, network="data", has_carrier=True),
                ["--network.node-interfaces", *named, *once],
            ),
            "interface that is not there": (
                lambda: None, ["--network.node-interfaces", host, "nosuch0", *once],
            ),
            "data link at 20 Mb/s": (
                lambda: cluster.slow_link(3, network="data", rate_mbps=20), [],
            ),
        }  # fmt: skip
        for name, (make, more) in faults.items():
            times = []
            for turn in range(pairs):
                make()
                begun = time.monotonic()
                run = f"{len(name)}-{turn}"
                with jobs.started(*_arguments(3, "--name", run, *more)) as process:
                    while host not in _problems(process.stdout, process.stderr):
                        if time.monotonic() - begun > 120:
                            raise SystemExit(f"never named: {name}\n{process.stdout}")
                        time.sleep(0.05)
                    times.append(time.monotonic() - begun)
                cluster.restore_link(3)
            print(f"{name}: {host} named after {_spread(times, ' s')}")


def _problems(stdout: str, stderr: str) -> str:
    lines = [line for line in stdout.splitlines() if line.startswith("network warning")]
    return "\n".join([*lines, stderr])


def bench_wires() -> None:
    """A model of a million parameters on three nodes without a setting of the network."""
    with LocalCluster(3) as cluster, _jobs(cluster) as jobs:
        wires = [
            (node.plan.number, link.network, link.interface)
            for node in cluster.nodes
            for link in node.plan.links
        ]

        def count() -> dict[str, int]:
            return {
                f"node {number} {interface} ({network})": sum(cluster.bytes_on(number, network))
                for number, network, interface in wires
            }

        arguments = _arguments(
            3, "--name", "wires", "--num-steps", "30", "--model.hidden-size", "256",
            "--model.intermediate-size", "688", "--model.num-layers", "3",
        )  # fmt: skip
        with jobs.started(*arguments) as process:
            process.wait_until(lambda: jobs.last_step("wires") >= 5, "step 5")
            before = count()
            process.wait_until(lambda: jobs.last_step("wires") >= 25, "step 25")
            after = count()
            process.wait(120)
    for wire, num_bytes in after.items():
        print(f"{wire}: {(num_bytes - before[wire]) / 1e6:,.2f} MB in 20 steps")


def main() -> None:
    """Run what is asked for, all of it by default."""
    arguments = sys.argv[1:]
    pairs = 3
    if "--pairs" in arguments:
        at = arguments.index("--pairs")
        pairs = int(arguments[at + 1])
        del arguments[at : at + 2]
    wanted = arguments or ["preflight", "faults", "wires"]
    if "preflight" in wanted:
        bench_preflight(pairs)
    if "faults" in wanted:
        bench_faults(pairs)
    if "wires" in wanted:
        bench_wires()


if __name__ == "__main__":
    main()
