# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that DeepSpeed itself saved on two ranks, imported: every bit, and a resume.

Real: DeepSpeed's engine and accessors, torchrun ranks, the command, a job that goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import ROOT, JobRunner, run_ckpt
from safetensors.torch import load_file

from raydist.checkpoint.journal import Journal
from raydist.checkpoint.ranges import WantedRange
from raydist.checkpoint.reads import plan_reads, read_spans
from raydist.checkpoint.restore import read_commit
from raydist.storage import open_store

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")


def _save(folder: Path, stage: int, precision: str) -> None:
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(SCRIPT), str(stage), precision, str(folder),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _assert_equal(run: Path, expected: Path) -> None:
    """Every tensor of the newest commit, read whole, is what DeepSpeed's accessors gave."""
    store = open_store(str(run))
    commit = Journal(store).newest_commit(Journal(store).tail())
    assert commit is not None
    manifest, _ = read_commit(store, commit)
    due = load_file(expected)
    assert manifest.tensors.keys() == due.keys()
    wanted = [
        WantedRange(spec=spec, offset=0, length=spec.numel) for spec in manifest.tensors.values()
    ]
    buffers = {w.spec.key: memoryview(bytearray(w.length * 4)) for w in wanted}
    read_spans(store, manifest, plan_reads(manifest, wanted), buffers)
    for key, tensor in due.items():
        assert manifest.tensors[key].shape == tuple(tensor.shape)
        assert buffers[key] == tensor.numpy().tobytes(), key
    assert manifest.scalars == {"adam_step": 3.0}
    assert (manifest.progress.step, manifest.progress.data_position) == (3, 6 * manifest.world_size)


@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (2, "fp32"), (1, "bf16")])
def test_import_is_deepspeeds_state_bit_for_bit_and_a_run_goes_on_from_it(
    jobs: JobRunner, stage: int, precision: str
) -> None:
    saved, run = jobs.folder / "saved", jobs.storage / "imported"
    _save(saved, stage, precision)
    done = run_ckpt("import", str(saved), "--to", str(run), "--json")
    assert done.exit_code == 0, done
    report = json.loads(done.stdout)
    assert (report["stage"], report["step"], report["world_size"]) == (stage, 3, 2)
    _assert_equal(run, saved / "expected.safetensors")
    assert run_ckpt("verify", str(run)).exit_code == 0
    again = run_ckpt("import", str(saved), "--to", str(run))
    assert again.exit_code == 2
    assert "There is a run imported already" in again.stderr
    strategy = "zero3" if stage == 3 else "ddp"
    done = jobs.run(
        "--name", "imported", "--num-steps", "5", "--strategy", strategy, launcher="torchrun"
    )
    assert done.exit_code == 0, done
    assert "resuming run imported at step 3 of 5" in done.stdout
    assert sorted(jobs.losses("imported")) == [4, 5]
