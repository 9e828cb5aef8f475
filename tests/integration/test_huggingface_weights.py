# SPDX-License-Identifier: Apache-2.0
"""Weights that transformers saved, loaded by ranks of both engines: its logits are the judge.

Real: torchrun ranks over gloo, the job's own model, directories of save_pretrained.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from job_process import JobRunner

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("weights_ranks.py")
_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}


def _model(family: str, *, tied: bool = False) -> Any:
    config_type, model_type = _FAMILIES[family]
    config = config_type(
        vocab_size=277,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(11)
    model = model_type(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, biases and norms too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("weights")
    found: dict[str, Path] = {}
    for family in _FAMILIES:
        found[family] = top / family
        _model(family).save_pretrained(found[family], max_shard_size="100KB")
        assert len(list(found[family].glob("*.safetensors"))) > 2
    found["tied"] = top / "tied"
    _model("llama", tied=True).save_pretrained(found["tied"])
    found["half"] = top / "half"
    _model("qwen2").bfloat16().save_pretrained(found["half"])
    found["resize"] = found["llama"]
    broken = _model("llama")
    with torch.no_grad():
        broken.model.norm.weight[-1] = float("nan")  # in the last rank's part
    found["refuse-nan"] = top / "nan"
    broken.save_pretrained(found["refuse-nan"])
    return found


def _run(
    directories: dict[str, Path], folder: Path, strategy: str, precision: str, world: int = 2
) -> dict[str, Any]:
    out = folder / "found.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={world}", str(SCRIPT), strategy, precision, str(out),
            *(f"{name}={path}" for name, path in directories.items()),
        ],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("strategy", "world"), [("zero3", 2), ("ddp", 2), ("zero3", 3)])
def test_weights_in_fp32_give_the_logits_of_from_pretrained_bit_for_bit(
    directories: dict[str, Path], tmp_path: Path, strategy: str, world: int
) -> None:
    found = _run(directories, tmp_path, strategy, "fp32", world)
    for name in ("llama", "qwen2", "tied", "half"):
        assert found[name]["equal"], (name, found[name])
        assert found[name]["before"] > found[name]["spread"], "the seed gave the same model"
        assert found[name]["said"][0].startswith(f"weights from {directories[name]}: ")
    assert found["resize"]["copied"]
    assert found["resize"]["kept"]
    assert found["resize"]["added"] == 6
    assert any("the other 6 begin from the seed" in line for line in found["resize"]["said"])
    refused = set(found["refuse-nan"]["said"])
    assert len(refused) == 1, "ranks must agree"
    assert f"rank {world - 1}: model.safetensors: element 47 of model.norm.weight" in refused.pop()


def test_weights_in_bf16_give_the_logits_of_from_pretrained_but_for_narrowed_buffers(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    chosen = {name: directories[name] for name in ("llama", "qwen2", "tied", "half")}
    found = _run(chosen, tmp_path, "zero3", "bf16")
    for name in chosen:
        assert found[name]["equal_but_for_buffers"], (name, found[name])
        assert found[name]["error"] < 0.1 * found[name]["spread"], (name, found[name])


def test_run_begins_from_weights_and_resumes_without_them(jobs: JobRunner) -> None:
    directory = jobs.folder / "weights"
    config = transformers.LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # a first loss that no seed gives
    model.save_pretrained(directory)
    arguments = ("--name", "begun", "--model.weights", str(directory))
    done = jobs.run(*arguments, "--num-steps", "1", launcher="torchrun")
    assert done.exit_code == 0, done
    assert f"weights from file://{directory}: 21 tensors" in done.stdout, done
    assert jobs.losses("begun")[1] > 6.5
    (directory / "model.safetensors").unlink()
    done = jobs.run(*arguments, "--num-steps", "2", "--optimizer.decay-steps", "1",
                    launcher="torchrun")  # fmt: skip
    assert done.exit_code == 0, done
    assert "weights from" not in done.stdout, done
    fresh = jobs.run("--name", "fresh", *arguments[2:], "--num-steps", "1", launcher="torchrun")
    assert fresh.exit_code != 0, fresh  # torchrun has statuses of its own
    assert "neither model.safetensors nor model.safetensors.index.json" in fresh.stderr, fresh
