# SPDX-License-Identifier: Apache-2.0
"""Where Ray is: placement, restart, job submission; and the entry for other launchers."""

from raydist.launch.launcher import launch, main

__all__ = ["launch", "main"]
