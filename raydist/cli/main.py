# SPDX-License-Identifier: Apache-2.0
"""`raydist COMMAND`: finds the command's module and turns its errors into exit statuses."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence

from raydist import __version__
from raydist.errors import ConfigError, FailureKind, RaydistError


def _submit(arguments: Sequence[str]) -> int:
    from raydist.cli import submit

    return submit.run(arguments)


def _ckpt(arguments: Sequence[str]) -> int:
    from raydist.cli import ckpt

    return ckpt.run(arguments)


def _cluster(arguments: Sequence[str]) -> int:
    from raydist.cli import cluster

    return cluster.run(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from raydist.cli import doctor

    return doctor.run(arguments)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "submit": ("submit a job, follow it, end with its exit status", _submit),
    "ckpt": ("list, show, verify, compare and prune a run's checkpoints", _ckpt),
    "doctor": ("is this cluster fit to train?", _doctor),
    "cluster": ("start a cluster of several nodes on this machine", _cluster),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Raises:
        OSError: Of a file, other than what stores turn into their own errors.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here, where a failure can still be said
        return status
    except RaydistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.kind.exit_code
    except KeyboardInterrupt:
        return FailureKind.INTERRUPTED.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output left; there is nobody to tell.
        return 0
    except OSError as error:
        if error.filename is not None:
            raise
        # A write of ours: stores name what they failed at, and open() its file.
        print(f"raydist: the output cannot be written: {error.strerror}", file=sys.stderr)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is still in the buffer
        return FailureKind.INPUT.exit_code


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: raydist COMMAND ...\n")
        for name, (text, _) in COMMANDS.items():
            print(f"  {name:<8} {text}")
        print("\n`raydist COMMAND --help` explains each.")
        return 0 if arguments else FailureKind.INPUT.exit_code
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1, cutoff=0.4)
        raise ConfigError(
            problem=f"There is no command {arguments[0]!r}.",
            way_out=f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}.",
        )
    return COMMANDS[arguments[0]][1](arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main())
