# SPDX-License-Identifier: Apache-2.0
"""Configuration of a run: frozen dataclasses, checked before a machine is asked for."""

from raydist.config.run import RunConfig, config_hash, diff_mathematics, mathematics, to_json_dict
from raydist.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    MetricsConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    ScalingConfig,
    ZeroConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "FaultConfig",
    "MetricsConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScalingConfig",
    "ZeroConfig",
    "config_hash",
    "diff_mathematics",
    "mathematics",
    "to_json_dict",
]
