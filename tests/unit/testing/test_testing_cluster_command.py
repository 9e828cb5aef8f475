# SPDX-License-Identifier: Apache-2.0
"""What `raydist cluster` refuses before it starts anything. Nothing is faked."""

from __future__ import annotations

import pytest

from raydist.cli import main as command_line
from raydist.errors import ConfigError, FailureKind
from raydist.testing.local_cluster import LocalCluster


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["cluster", "remote"], "cluster remote"),
        (["cluster", "local", "--nodes", "0"], "not 0"),
        (["cluster", "local", "--nodes", "201"], "not 201"),
    ],
)
def test_cluster_command_refuses_what_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    assert command_line.main(arguments) == FailureKind.INPUT.exit_code
    assert names in capsys.readouterr().err


def test_local_cluster_of_no_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 200 nodes"):
        LocalCluster(0)
