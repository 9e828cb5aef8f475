# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: ranges of tensors in objects, a manifest over them, a journal that decides."""
