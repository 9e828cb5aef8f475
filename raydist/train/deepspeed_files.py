# SPDX-License-Identifier: Apache-2.0
"""Reading what ``DeepSpeedEngine.save_checkpoint`` wrote, without running what is in it.

Its files are pickles. torch's weights-only unpickler reads them; the two classes of DeepSpeed's
own that occur in them are replaced by stand-ins without behaviour, anything else is refused by
name.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raydist.errors import CheckpointCorruptError, ConfigError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_WAY_OUT = "Name a directory that DeepSpeed 0.19's engine.save_checkpoint wrote with ZeRO 1 to 3."


class _StandIn:
    """Takes the place of a DeepSpeed class in a pickle: keeps the attributes, does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


_ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedFiles:
    """One tag of a checkpoint directory.

    Fields:
        optimizer: The ranks' files with optimizer state, in rank order.
        model: Rank 0's file with names, shapes and counters.
    """

    tag: str
    optimizer: tuple[Path, ...]
    model: Path

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return len(self.optimizer)


def find_files(directory: Path, tag: str | None = None) -> DeepSpeedFiles:
    """Find the files of ``tag``, or of the tag that `latest` names.

    Raises:
        ConfigError: It is no such checkpoint, or one of tensor, pipeline or expert parallelism.
        CheckpointCorruptError: A rank's file is missing.
    """
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            raise ConfigError(
                problem=f"{directory} has no file `latest`.", way_out=f"Say --tag. {_WAY_OUT}"
            )
        tag = latest.read_text().strip()
    folder = directory / tag
    if not folder.is_dir():
        raise ConfigError(problem=f"There is no folder {tag} in {directory}.", way_out=_WAY_OUT)
    names = sorted(path.name for path in folder.iterdir())
    found = {m.groups(): name for name in names if (m := _OPTIMIZER_FILE.fullmatch(name))}
    odd = [n for n in names if n.startswith(("layer_", "expert_", "expp_rank_"))]
    odd += [name for (_, model_rank), name in found.items() if int(model_rank)]
    if odd or not found:
        what = f"{odd[0]}: it was saved by another kind of parallelism" if odd else "no ZeRO state"
        raise ConfigError(problem=f"{folder} has {what}.", way_out=_WAY_OUT)
    ranks = {int(rank): name for (rank, _), name in found.items()}
    missing = sorted(set(range(max(ranks) + 1)) - ranks.keys())
    if missing:
        raise CheckpointCorruptError(key=str(folder), reason=f"no file of ranks {missing}")
    model = next((folder / name for name in _MODEL_FILES if name in names), None)
    if model is None:
        raise CheckpointCorruptError(key=str(folder), reason="no file with model states")
    return DeepSpeedFiles(
        tag=tag, optimizer=tuple(folder / ranks[rank] for rank in sorted(ranks)), model=model
    )


def load_file(path: Path) -> dict[str, Any]:
    """Read one file; tensors stay on disk until they are used.

    Raises:
        ConfigError: It holds an object of a class that is not allowed; the class is named.
        CheckpointCorruptError: It cannot be read.
    """
    allowed: list[Any] = [(_StandIn, name) for name in _ALLOWED]
    with torch.serialization.safe_globals(allowed):
        try:
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if not refused:
                return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except (
            OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError
        ) as error:  # fmt: skip
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise CheckpointCorruptError(key=str(path), reason=reason) from error
    raise ConfigError(
        problem=f"{path} holds {', '.join(refused)}, which is not among the classes that a "
        "DeepSpeed checkpoint needs; nothing of it was run.",
        way_out="If it is your own client_state, save again without it.",
    )
