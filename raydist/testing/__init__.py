# SPDX-License-Identifier: Apache-2.0
"""Doubles and beds for tests, shipped so that jobs can be tested with them too."""
