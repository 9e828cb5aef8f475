# SPDX-License-Identifier: Apache-2.0
"""The command line of a job. Real: tyro; the recipes are made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raydist.config import RunConfig
from raydist.config.cli import Request, parse_request
from raydist.errors import ConfigError
from raydist.testing.configs import small_config


def tiny() -> RunConfig:
    """A recipe for tests."""
    return small_config(name="tiny")


def large_8b() -> RunConfig:
    """Another."""
    return small_config(name="large-8b", num_steps=1000, **{"scaling.workers": 8})


_RECIPES = {"tiny": tiny, "large_8b": large_8b}


@pytest.fixture(autouse=True)
def _terminal_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def _parse(*arguments: str) -> Request:
    return parse_request(_RECIPES, arguments, program="job.py")


def test_cli_without_arguments_is_the_first_recipe_as_it_is() -> None:
    assert _parse() == Request(recipe="tiny", config=tiny())


def test_cli_recipe_by_name_is_that_recipe() -> None:
    assert _parse("large_8b") == Request(recipe="large_8b", config=large_8b())


def test_cli_overrides_change_their_fields_only() -> None:
    request = _parse(
        "large_8b", "--num-steps", "20", "--optimizer.learning-rate", "3e-4",
        "--model.num_layers=3", "--data.no-shuffle", "--checkpoint.every-steps", "None",
        "--scaling.workers", "4", "--strategy", "ddp", "--storage", "s3://bucket/runs",
    )  # fmt: skip
    assert request.config == small_config(
        name="large-8b", num_steps=20, strategy="ddp", storage="s3://bucket/runs",
        **{
            "optimizer.learning_rate": 3e-4, "model.num_layers": 3, "data.shuffle": False,
            "checkpoint.every_steps": None, "scaling.workers": 4,
        },
    )  # fmt: skip


def test_cli_save_policies_are_typed() -> None:
    auto = _parse("--checkpoint.every-steps", "auto", "--checkpoint.when-busy", "skip").config
    assert (auto.checkpoint.every_steps, auto.checkpoint.when_busy) == ("auto", "skip")
    timed = _parse("--checkpoint.every-steps", "None", "--checkpoint.every-s", "90").config
    assert (timed.checkpoint.every_steps, timed.checkpoint.every_s) == (None, 90.0)


def test_cli_request_flags_are_off_unless_given() -> None:
    request = _parse("--dry-run", "--takeover", "--allow-config-change")
    assert (request.dry_run, request.takeover, request.allow_config_change) == (True, True, True)
    request = _parse()
    assert (request.dry_run, request.takeover, request.allow_config_change) == (False, False, False)


@pytest.mark.parametrize(("name", "near"), [("tyni", "tiny"), ("large8b", "large_8b")])
def test_cli_unknown_recipe_offers_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _parse(name)
    assert str(caught.value) == (
        f"There is no recipe '{name}'; this job has tiny, large_8b.\n  Did you mean {near}?"
    )


def test_cli_unknown_recipe_unlike_any_names_them_all() -> None:
    with pytest.raises(ConfigError, match=r"has tiny, large_8b\.\n  Choose one of these"):
        _parse("zzz")


def _exit_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Text on standard error of a call that exits with status 2, as one line."""
    with pytest.raises(SystemExit) as caught:
        _parse(*arguments)
    assert caught.value.code == 2
    return " ".join(re.sub(r"[^\x20-\x7e]+", " ", capsys.readouterr().err).split())


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--num-step", "--num-steps"),
        ("--optimizer.learning-rat", "--optimizer.learning-rate"),
        ("--learning-rate", "--optimizer.learning-rate"),
        ("--batch.global-batch", "--batch.global-batch-size"),
    ],
)
def test_cli_unknown_flag_exits_2_with_the_nearest(
    flag: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _exit_text(capsys, flag, "1")
    assert f"Unrecognized options: {flag}" in text
    assert f"{near} " in text.partition("Perhaps you meant:")[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--num-steps", "many"), "--num-steps"),
        (("--num-steps", "1.5"), "--num-steps"),
        (("--optimizer.learning-rate", "fast"), "--optimizer.learning-rate"),
        (("--strategy", "zero2"), "('ddp', 'zero3')"),
        (("--precision", "fp16"), "('fp32', 'bf16')"),
        (("--checkpoint.every-steps", "often"), "--checkpoint.every-steps"),
        (("--num-steps",), "--num-steps"),
        (("tiny", "large_8b"), "large_8b"),
    ],
)
def test_cli_value_of_the_wrong_type_exits_2_naming_it(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in _exit_text(capsys, *arguments)


def test_cli_value_that_its_section_refuses_is_the_sections_own_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.workers=0 is not above 0"):
        _parse("--scaling.workers", "0")
    assert capsys.readouterr().err == ""


def test_cli_values_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps=11 is longer than the schedule of 10"):
        _parse("--optimizer.warmup-steps", "11")


@pytest.mark.parametrize("arguments", [("--local_rank=1",), ("--local_rank=0", "large_8b")])
def test_cli_local_rank_of_the_deepspeed_launcher_is_accepted(arguments: tuple[str, ...]) -> None:
    assert _parse(*arguments) == _parse(*arguments[1:])


def test_cli_ds_config_is_taken_onto_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 32, "gradient_clipping": 0.5}))
    request = _parse("--ds-config", str(path), "--batch.micro-batch-size", "4")
    expected: dict[str, Any] = {
        "batch.global_batch_size": 32, "batch.micro_batch_size": 4, "optimizer.max_grad_norm": 0.5
    }  # fmt: skip
    assert request.config == small_config(name="tiny", **expected)
    assert request.ds_report is not None


def test_cli_ds_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no DeepSpeed configuration at"):
        _parse("--ds-config", str(tmp_path / "none.json"))


_FLAGS = """
--activation-checkpointing
--allow-config-change
--batch.global-batch-size
--batch.micro-batch-size
--checkpoint.agree-timeout-s
--checkpoint.every-s
--checkpoint.every-steps
--checkpoint.keep-every-steps
--checkpoint.keep-last
--checkpoint.max-abandoned
--checkpoint.when-busy
--data.no-shuffle
--data.sequence-length
--data.shuffle
--data.source
--data.tokenizer
--dry-run
--ds-config
--fault.max-nonfinite-steps
--fault.max-worker-failures
--fault.node-mtbf-hours
--help
--metrics.progress-every-s
--metrics.sample-tokens
--model.architecture
--model.hidden-size
--model.intermediate-size
--model.no-tie-embeddings
--model.num-attention-heads
--model.num-key-value-heads
--model.num-layers
--model.rms-norm-eps
--model.rope-theta
--model.tie-embeddings
--model.vocab-size
--model.weights
--name
--network.debug
--network.interface
--network.master-port
--network.node-interfaces
--network.reach-timeout-s
--network.timeout-s
--no-activation-checkpointing
--no-allow-config-change
--no-dry-run
--no-takeover
--num-steps
--optimizer.beta1
--optimizer.beta2
--optimizer.decay-steps
--optimizer.eps
--optimizer.learning-rate
--optimizer.max-grad-norm
--optimizer.min-learning-rate-ratio
--optimizer.schedule
--optimizer.warmup-steps
--optimizer.weight-decay
--precision
--resume
--scaling.accelerator-type
--scaling.cpu-workers
--scaling.cpus-per-worker
--scaling.exclude-nodes
--scaling.gpus-per-node
--scaling.gpus-per-worker
--scaling.labels
--scaling.no-preflight
--scaling.nodes
--scaling.plan-device
--scaling.preflight
--scaling.start-timeout-s
--scaling.workers
--seed
--storage
--strategy
--takeover
--zero.offload-optimizer
--zero.offload-parameters
-h
"""


def test_cli_flags_are_exactly_these(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts of users depend on them: a change here is a change for them."""
    with pytest.raises(SystemExit) as caught:
        _parse("--help")
    assert not caught.value.code
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9.-]*", _options(capsys.readouterr().out)))
    assert shown == set(_FLAGS.split())


def _options(help_text: str) -> str:
    """The lines of the help that name flags, without what explains them."""
    lines = [line.lstrip("\u2502 ") for line in help_text.splitlines()]
    return "\n".join(line for line in lines if line.startswith("-"))
