# SPDX-License-Identifier: Apache-2.0
"""Exports: what transformers makes of them, what is refused, what a killed one leaves.

Real: transformers, the safetensors package, the journal, files. Faked: ranks are threads.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_scenario import Fault, WatchedStore, newest_commit
from huggingface_run import LENGTH, commit_tensors, run_config
from safetensors import safe_open

from raydist.checkpoint.huggingface_export import export_weights
from raydist.checkpoint.huggingface_shards import plan_shards
from raydist.checkpoint.restore import read_commit
from raydist.config import RunConfig
from raydist.config.huggingface import config_json, transformers_arguments
from raydist.errors import CheckpointCorruptError, CheckpointError, ConfigError, StorageError
from raydist.plan.parameters import parameter_shapes
from raydist.storage import open_store
from raydist.testing.memory_store import MemoryStore

_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _model(config: RunConfig) -> Any:
    config_type, model_type = _FAMILIES[config.model.architecture]
    torch.manual_seed(2)
    model = model_type(config_type(**transformers_arguments(config.model, max_positions=LENGTH)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _state(model: Any) -> dict[str, torch.Tensor]:
    masters = {f"master/{n}": p for n, p in model.named_parameters()}
    return masters | {f"exp_avg/{n}": torch.zeros_like(p) for n, p in model.named_parameters()}


def _export(source, target, config: RunConfig, dtype: str = "F32", **options: Any):
    commit = newest_commit(source)
    assert commit is not None
    document = config_json(
        config.model,
        max_positions=LENGTH,
        dtype=str(_TORCH[dtype]).removeprefix("torch."),
        eos_token_id=256,
    )
    defaults: dict[str, Any] = {"shard_bytes": 40_000, "window_bytes": 5_000}
    return export_weights(
        source=source,
        manifest=options.pop("manifest", None) or read_commit(source, commit)[0],
        target=target,
        shapes=options.pop("shapes", None) or parameter_shapes(config.model),
        dtype=dtype,
        document=document,
        **{**defaults, **options},
    )


def _logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [40_000, 1 << 30])
def test_export_gives_the_models_logits_through_from_pretrained(
    tmp_path: Path, architecture: Any, tied: bool, dtype: str, shard_bytes: int
) -> None:
    config = run_config(architecture=architecture, tie_embeddings=tied)
    model = _model(config)
    source = MemoryStore()
    commit_tensors(source, _state(model), config=config)
    exported = _export(source, open_store(str(tmp_path)), config, dtype, shard_bytes=shard_bytes)
    assert exported.parameters == sum(p.numel() for p in model.parameters())
    assert exported.bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert (len(exported.files) > 1) == (shard_bytes == 40_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    assert next(loaded.parameters()).dtype == _TORCH[dtype]
    expected = model
    for parameter in model.parameters():  # alone: the rotary frequencies stay fp32, as loaded
        parameter.data = parameter.data.to(_TORCH[dtype])
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert torch.equal(_logits(loaded), _logits(expected))


def test_export_shards_are_within_the_limit_and_indexed(tmp_path: Path) -> None:
    config = run_config()
    source = MemoryStore()
    commit_tensors(source, _state(_model(config)))
    _export(source, open_store(str(tmp_path)), config)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            assert opened.metadata() == {"format": "pt"}
            found |= dict.fromkeys(names, file.name)
            size = sum(opened.get_tensor(n).nbytes for n in names)
            assert size <= 40_000 or len(names) == 1
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        4 * torch.Size(s).numel() for s in parameter_shapes(config.model).values()
    )


def test_export_in_one_window_reads_every_byte_once() -> None:
    config = run_config()
    source = MemoryStore()
    state = {f"master/{n}": torch.randn(s) for n, s in parameter_shapes(config.model).items()}
    commit_tensors(source, state, world_size=2)
    exported = _export(source, MemoryStore(), config, shard_bytes=1 << 30, window_bytes=1 << 20)
    stored = sum(size for key, size in source.list("checkpoints/") if "rank-" in key)
    assert exported.bytes_read == stored


def test_export_of_partly_narrow_masters_is_exact(tmp_path: Path) -> None:
    config = run_config()
    state = {f"master/{n}": torch.randn(s) for n, s in parameter_shapes(config.model).items()}
    frozen = "master/model.norm.weight"
    state[frozen] = state[frozen].bfloat16()
    source = MemoryStore()
    commit_tensors(source, state)
    _export(source, open_store(str(tmp_path)), config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.norm.weight, state[frozen].float())


@pytest.mark.parametrize(
    ("key", "tensor", "named"),
    [
        ("master/model.norm.weight", None, "model.norm.weight is missing"),
        ("master/model.norm.weight", torch.ones(47), r"model.norm.weight is \[47\], not \[48\]"),
        ("master/model.norm.weight", torch.ones(0), "model.norm.weight is "),
        ("master/adapter.weight", torch.ones(4), "adapter.weight is not of the model"),
    ],
)
def test_export_of_a_manifest_without_the_models_tensors_writes_nothing(
    key: str, tensor: torch.Tensor | None, named: str
) -> None:
    config = run_config()
    state = _state(_model(config))
    state.pop(key, None)
    if tensor is not None:
        state[key] = tensor
    source, target = MemoryStore(), MemoryStore()
    commit_tensors(source, state)
    with pytest.raises(CheckpointError, match=named):
        _export(source, target, config)
    assert list(target.list("")) == []


def test_export_of_an_empty_tensor_is_impossible_even_where_the_model_has_one() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit_tensors(source, {"master/a": torch.ones(3), "master/b": torch.ones(0, 4)})
    with pytest.raises(CheckpointError, match="b has no elements"):
        _export(source, target, run_config(), shapes={"a": (3,), "b": (0, 4)})
    with pytest.raises(CheckpointError, match="Nothing to export"):
        plan_shards({"b": (0, 4)}, dtype="F32", shard_bytes=10)
    with pytest.raises(CheckpointError, match="Nothing to export in the model"):
        plan_shards({}, dtype="F32", shard_bytes=10)


def test_export_of_ranges_with_a_gap_is_refused_by_the_manifest_itself() -> None:
    config = run_config()
    source = MemoryStore()
    commit_tensors(source, _state(_model(config)))
    commit = newest_commit(source)
    assert commit is not None
    manifest = read_commit(source, commit)[0]
    key = "master/model.norm.weight"
    ranges = {**manifest.ranges, key: manifest.ranges[key][:-1]}
    with pytest.raises(CheckpointError, match=f"{key}: ranges cover"):
        dataclasses.replace(manifest, ranges=ranges).check()


def test_export_into_fp16_refuses_what_it_cannot_hold_and_leaves_no_config() -> None:
    config = run_config()
    model = _model(config)
    with torch.no_grad():
        model.lm_head.weight[5, 7] = 7e4
    source, target = MemoryStore(), MemoryStore()
    commit_tensors(source, _state(model))
    with pytest.raises(CheckpointError, match=r"master/lm_head.weight has a value .* F16 cannot"):
        _export(source, target, config, "F16")
    assert "config.json" not in dict(target.list(""))
    _export(source, target, config, "BF16", overwrite=True)
    assert "config.json" in dict(target.list(""))


def test_export_of_an_altered_object_is_refused_and_leaves_no_config() -> None:
    config = run_config()
    source, target = MemoryStore(), MemoryStore()
    commit_tensors(source, _state(_model(config)))
    key = next(k for k, _ in source.list("checkpoints/") if "rank-00001" in k)
    raw = bytearray(source.get(key))
    raw[len(raw) // 2] ^= 1
    source.put(key, bytes(raw))
    with pytest.raises(CheckpointCorruptError, match="does not match its CRC32C"):
        _export(source, target, config)
    assert "config.json" not in dict(target.list(""))


def test_export_to_a_target_in_use_is_refused_until_told(tmp_path: Path) -> None:
    config = run_config()
    source = MemoryStore()
    commit_tensors(source, _state(_model(config)))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00099.safetensors").write_bytes(b"an earlier one")
    (tmp_path / "notes.txt").write_text("mine")
    target = open_store(str(tmp_path))
    with pytest.raises(ConfigError, match=r"not empty: config.json, model-00001"):
        _export(source, target, config)
    assert (tmp_path / "config.json").read_text() == "{}"
    _export(source, target, config, overwrite=True)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "model-00001-of-00099.safetensors").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_export_whose_target_fails_leaves_nothing_that_is_loaded() -> None:
    config = run_config()
    source = MemoryStore()
    commit_tensors(source, _state(_model(config)))
    for part in ("model-00003", "index.json", "config.json"):
        inner = MemoryStore()
        target = WatchedStore(inner, Fault(operation="put", part=part))
        with pytest.raises(StorageError, match="injected"):
            _export(source, target, config)
        assert "config.json" not in dict(inner.list(""))


def test_export_copies_the_tokenizer(tmp_path: Path) -> None:
    config = run_config()
    source, target, tokenizer = MemoryStore(), MemoryStore(), MemoryStore()
    commit_tensors(source, _state(_model(config)))
    with pytest.raises(ConfigError, match="There is no tokenizer"):
        _export(source, target, config, tokenizer=tokenizer)
    assert list(target.list("")) == []
    tokenizer.put("tokenizer.json", b"{}")
    tokenizer.put("model.safetensors", b"not a part of it")
    _export(source, target, config, tokenizer=tokenizer, shard_bytes=1 << 30)
    assert dict(target.list("")).keys() == {"config.json", "model.safetensors", "tokenizer.json"}


_EXPORT = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    from raydist.checkpoint.huggingface_export import export_weights
    from raydist.checkpoint.journal import Journal
    from raydist.checkpoint.restore import read_commit
    from raydist.storage import open_store

    def peak():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

    run, to, window, kill_with = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    source = open_store(run)
    journal = Journal(source)
    manifest, _ = read_commit(source, journal.newest_commit(journal.tail()))
    shapes = {k.removeprefix("master/"): s.shape for k, s in manifest.tensors.items()
              if k.startswith("master/")}
    class Deadly:
        def get(self, key, **where):
            if kill_with and Path(to, kill_with).exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return source.get(key, **where)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    done = export_weights(source=Deadly(), manifest=manifest, target=open_store(to), shapes=shapes,
                   dtype="BF16", shard_bytes=1 << 26, document={"model_type": "llama"},
                   window_bytes=window)
    print(json.dumps({"grown": peak() - before, "read": done.bytes_read}))
""")


def _run_export(run: Path, to: Path, *, window_bytes: int, kill_with: str = ""):
    return subprocess.run(
        [sys.executable, "-c", _EXPORT, str(run), str(to), str(window_bytes), kill_with],
        capture_output=True,
        text=True,
        check=False,
    )


def _large_weight(number: int) -> torch.Tensor:
    return (torch.arange(2048 * 4096, dtype=torch.float32) * 1.7 + number).view(2048, 4096)


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 MiB of masters and as many of one moment, by two ranks."""
    run = tmp_path_factory.mktemp("large")
    state = {}
    for number in range(8):
        weight = _large_weight(number)
        state |= {f"master/w{number}": weight, f"exp_avg/w{number}": weight}
    commit_tensors(open_store(str(run)), state, world_size=2)
    return run


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_export_peak_memory_is_a_few_windows_whatever_the_checkpoint(
    large_run: Path, tmp_path: Path
) -> None:
    done = _run_export(large_run, tmp_path / "out", window_bytes=8 << 20)
    assert done.returncode == 0, done.stderr
    # 512 MiB are stored, 256 of them are wanted: two windows of 8, their reads, one slice.
    found = json.loads(done.stdout)
    assert found["grown"] < 64 << 20
    assert 256 << 20 <= found["read"] <= 1.25 * (256 << 20)  # whole blocks, and no moments
    with safe_open(tmp_path / "out" / "model-00002-of-00002.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("w7"), _large_weight(7).bfloat16())


def test_export_killed_midway_leaves_a_directory_that_is_not_loaded(
    large_run: Path, tmp_path: Path
) -> None:
    out, first = tmp_path / "out", "model-00001-of-00002.safetensors"
    done = _run_export(large_run, out, window_bytes=8 << 20, kill_with=first)
    assert done.returncode == -9
    assert [f.name for f in out.iterdir() if not f.name.startswith(".tmp-")] == [first]
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(out)
