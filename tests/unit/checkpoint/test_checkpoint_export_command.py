# SPDX-License-Identifier: Apache-2.0
"""`raydist ckpt export` from the command line to from_pretrained. Faked: the ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_run import commit_tensors, run_config

from raydist.cli.main import main
from raydist.config import RunConfig
from raydist.plan.parameters import parameter_shapes
from raydist.storage import open_store


def _commit(run: Path, config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    state = {f"master/{n}": torch.randn(s) for n, s in parameter_shapes(config.model).items()}
    commit_tensors(open_store(str(run)), state, step=step, config=config)
    return {key.removeprefix("master/"): tensor for key, tensor in state.items()}


def _assert_holds(directory: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    found = dict(model.named_parameters())
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], t.to(dtype)) for n, t in state.items())


def test_export_command_writes_the_newest_step_in_bf16(tmp_path: Path, capsys) -> None:
    config = run_config(architecture="qwen2")
    _commit(tmp_path / "run", config, 3)
    newest = _commit(tmp_path / "run", config, 6)
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(out)]) == 0
    assert "step 6: " in capsys.readouterr().out
    _assert_holds(out, newest, torch.bfloat16)
    loaded = transformers.AutoConfig.from_pretrained(out)
    assert (loaded.max_position_embeddings, loaded.eos_token_id) == (32, 256)
    assert loaded.rms_norm_eps == 1e-5


def test_export_command_writes_a_chosen_step_and_says_it_in_json(tmp_path: Path, capsys) -> None:
    config = run_config()
    older = _commit(tmp_path / "run", config, 3)
    _commit(tmp_path / "run", config, 6)
    out = tmp_path / "out"
    arguments = ["ckpt", "export", str(tmp_path / "run"), "--to", str(out), "--json"]
    more = ["--step", "3", "--dtype", "fp32", "--shard-gib", "0.00005"]
    assert main([*arguments, *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 3
    assert set(report["files"]) == {f.name for f in out.glob("*.safetensors")}
    assert len(report["files"]) > 3
    _assert_holds(out, older, torch.float32)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--step", "4"], "no committed checkpoint of step 4 .*\n.*There are: 6, 3"),
        (["--shard-gib", "0"], "--shard-gib 0.0 holds nothing"),
        (["--tokenizer", "/nowhere/at/all"], "There is no tokenizer"),
    ],
)
def test_export_command_refuses(tmp_path: Path, capsys, more: list[str], text: str) -> None:
    config = run_config()
    _commit(tmp_path / "run", config, 3)
    _commit(tmp_path / "run", config, 6)
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(out), *more]) == 2
    assert not out.exists()
    assert re.search(text, capsys.readouterr().err)


def test_export_command_of_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["ckpt", "export", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert "no committed checkpoint" in capsys.readouterr().err


def test_export_command_of_a_run_without_its_record_is_refused(tmp_path: Path, capsys) -> None:
    config = run_config()
    _commit(tmp_path / "run", config, 3)
    (tmp_path / "run" / "run.json").unlink()
    arguments = ["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]
    assert main(arguments) == 5
    assert "has no run.json" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").write_text('{"config": {"model": {"new_field": 1}}}')
    assert main(arguments) == 5
    assert "run.json cannot be read" in capsys.readouterr().err
