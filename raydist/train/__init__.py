# SPDX-License-Identifier: Apache-2.0
"""One rank's work: engines, loop, feed. Nothing here knows Ray."""
