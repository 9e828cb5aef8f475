# SPDX-License-Identifier: Apache-2.0
"""One thin module a command."""
