# SPDX-License-Identifier: Apache-2.0
"""A job whose output nobody reads any more. Real processes and pipes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from raydist.launch.outliving import outlive_readers
outlive_readers()
for line in range(20000):
    print("line", line, flush=line % 7 == 0)
print("all was said", file=sys.stderr)
"""


@pytest.mark.parametrize("reader", ["head -1", "cat > /dev/full"])
def test_program_goes_on_when_its_reader_is_gone(reader: str) -> None:
    target = "> /dev/full" if "full" in reader else f"| {reader}"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$0" {target}; echo "status ${{PIPESTATUS[0]}}" >&2',
         PROGRAM],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "all was said" in done.stderr
    assert "status 0" in done.stderr
    assert "Traceback" not in done.stderr
