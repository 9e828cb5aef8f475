# SPDX-License-Identifier: Apache-2.0
"""What failed, and what next: decisions without acts."""

from raydist.fault.policy import Decision, RankReport, decide

__all__ = ["Decision", "RankReport", "decide"]
