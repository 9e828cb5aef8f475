# SPDX-License-Identifier: Apache-2.0
"""From a command line to a finished run, whatever started this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.config.cli import Request, parse_request
from raydist.errors import ClusterError, FailureKind, RankFailedError, RaydistError
from raydist.launch.outliving import outlive_readers
from raydist.train.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run that did every planned step.

    Fields:
        run_url: Where its checkpoints, metrics and reports lie.
        step: Steps done.
        loss: Of the last finite step, None when the run was finished before.
    """

    run_url: str
    step: int
    loss: float | None


def main(job: Job, arguments: Sequence[str] | None = None) -> int:
    """Run a job from the command line and return the process's exit status.

    0: every planned step is done. Otherwise the value of the FailureKind; 2 for anything that
    was wrong with the request, before a machine was asked for.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    outlive_readers()
    status = _run(job, arguments)
    if _has_other_launcher():
        # gloo's threads outlive the process groups and may want the interpreter while it ends,
        # which aborts a rank whose work is done; all of it is flushed, so leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(job: Job, arguments: Sequence[str]) -> int:
    recipes = dict(zip(job.recipe_names, job.recipes, strict=True))
    try:
        request = parse_request(recipes, arguments, program=Path(sys.argv[0]).name)
        launch(job, request)
    except RaydistError as error:
        # What all ranks were refused for is said once; what one of them met, by that one.
        is_own = isinstance(error, RankFailedError | ClusterError)
        if is_own or os.environ.get("RANK", "0") == "0":
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.kind.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The last committed checkpoint stands.", file=sys.stderr, flush=True)
        return FailureKind.INTERRUPTED.exit_code
    return 0


def launch(job: Job, request: Request) -> RunResult | None:
    """Run a job to its last step: under the launcher that started this process, or on Ray.

    Returns:
        None for a dry run, and on ranks other than 0 under another launcher.

    Raises:
        RaydistError: Its ``kind`` says what failed.
    """
    # Each of these imports what it needs and no more; a dry run needs no torch, and Ray only where
    # there is a cluster to ask.
    if request.dry_run:
        from raydist.launch.cluster import cluster_address
        from raydist.launch.dry_run import describe_request

        print(describe_request(request), flush=True)
        address = cluster_address()
        if address is not None:
            from raydist.launch.cluster_plan import describe_on_cluster

            print(f"\n{describe_on_cluster(request, address)}", flush=True)
        return None
    if _has_other_launcher():
        from raydist.launch.ranked import run_ranked

        return run_ranked(job, request)
    from raydist.launch.on_ray import run_on_ray

    return run_on_ray(job, request)


def _has_other_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
