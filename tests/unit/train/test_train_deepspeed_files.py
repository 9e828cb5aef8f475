# SPDX-License-Identifier: Apache-2.0
"""Files of a DeepSpeed checkpoint: found or refused, never run. Real: torch.save."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from raydist.errors import CheckpointCorruptError, ConfigError
from raydist.train.deepspeed_files import find_files, load_file


class _Command:
    """Runs a command when an ordinary unpickler meets it."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self):
        return os.system, (self._command,)


def _checkpoint(top: Path, *names: str, tag: str = "global_step3") -> Path:
    (top / tag).mkdir()
    for name in names:
        torch.save({"a": torch.ones(2)}, top / tag / name)
    (top / "latest").write_text(tag)
    return top


STAGE2 = (
    "mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)
STAGE3 = (
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "zero_pp_rank_1_mp_rank_00_model_states.pt",
    *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(11)),
)


def test_files_of_stage_2_are_found_in_rank_order(tmp_path: Path) -> None:
    found = find_files(_checkpoint(tmp_path, *STAGE2))
    assert [p.name for p in found.optimizer] == [STAGE2[2], STAGE2[1]]
    assert found.model.name == STAGE2[0]
    assert (found.tag, found.world_size) == ("global_step3", 2)


def test_files_of_stage_3_are_found_in_numeric_rank_order(tmp_path: Path) -> None:
    found = find_files(_checkpoint(tmp_path, *STAGE3))
    assert [p.name for p in found.optimizer] == list(STAGE3[2:])
    assert found.model.name == STAGE3[0]


def test_files_of_a_named_tag_need_no_latest(tmp_path: Path) -> None:
    _checkpoint(tmp_path, *STAGE2, tag="other")
    (tmp_path / "latest").unlink()
    assert find_files(tmp_path, "other").tag == "other"
    with pytest.raises(ConfigError, match="no file `latest`"):
        find_files(tmp_path)
    with pytest.raises(ConfigError, match="no folder global_step9"):
        find_files(tmp_path, "global_step9")


def test_files_of_a_missing_rank_are_refused(tmp_path: Path) -> None:
    top = _checkpoint(tmp_path, *STAGE3)
    (top / "global_step3" / STAGE3[5]).unlink()
    with pytest.raises(CheckpointCorruptError, match=r"no file of ranks \[3\]"):
        find_files(top)


def test_files_without_model_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptError, match="no file with model states"):
        find_files(_checkpoint(tmp_path, *STAGE2[1:]))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("layer_00-model_states.pt", "layer_00-model_states.pt: it was saved by another kind"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "another kind of parallelism"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "another kind of parallelism"),
    ],
)
def test_files_of_other_parallelism_are_refused(tmp_path: Path, extra: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_files(_checkpoint(tmp_path, *STAGE2, extra))


def test_files_without_zero_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ZeRO state"):
        find_files(_checkpoint(tmp_path, STAGE2[0]))


def test_file_with_another_class_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"a": _Command(f"touch {ran}")}, tmp_path / "command.pt")
    with pytest.raises(ConfigError, match=r"holds posix\.system"):
        load_file(tmp_path / "command.pt")
    assert not ran.exists()
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "namespace.pt")
    with pytest.raises(ConfigError, match=r"holds argparse\.Namespace.*nothing of it was run"):
        load_file(tmp_path / "namespace.pt")


@pytest.mark.parametrize("cut", [0, 100, -200])
def test_file_that_is_cut_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointCorruptError, match=r"cut\.pt"):
        load_file(path)
