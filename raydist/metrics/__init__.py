# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run: what a step costs, where they are kept, and how they are shown."""

from raydist.metrics.curve import render_curve
from raydist.metrics.flops import flops_per_token, mfu, num_active_parameters, peak_flops_per_s
from raydist.metrics.history import History, MergedHistory, merge, read_history
from raydist.metrics.progress import ProgressEvent, ProgressPrinter, format_progress
from raydist.metrics.sink import AppendSink, MetricSink, SegmentSink, open_sink

__all__ = [
    "AppendSink",
    "History",
    "MergedHistory",
    "MetricSink",
    "ProgressEvent",
    "ProgressPrinter",
    "SegmentSink",
    "flops_per_token",
    "format_progress",
    "merge",
    "mfu",
    "num_active_parameters",
    "open_sink",
    "peak_flops_per_s",
    "read_history",
    "render_curve",
]
