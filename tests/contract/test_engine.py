"""The Engine protocol, held by every engine: real torchrun ranks over gloo, nothing faked."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).with_name("engine_scenarios.py")
STRATEGIES = ("zero3", "ddp")
pytestmark = pytest.mark.timeout(300)


def run_ranks(scenario, folder, *, strategy, precision="fp32", world=2, micro=1):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={world}", str(SCENARIOS),
        scenario, str(folder), strategy, precision, str(micro),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    name = f"{scenario}-{strategy}-{precision}-{world}-{micro}.json"
    return json.loads(Path(folder, name).read_text())


@pytest.fixture(scope="module", params=list(itertools.product(STRATEGIES, ("fp32", "bf16"))),
                ids=lambda p: "-".join(p))  # fmt: skip
def contract(request, tmp_path_factory):
    strategy, precision = request.param
    folder = tmp_path_factory.mktemp("contract")
    return run_ranks("contract", folder, strategy=strategy, precision=precision)


def test_engine_exported_ranges_are_the_wanted_ones(contract):
    assert contract["wanted_is_exported"]
    kinds = {key.split("/")[0] for key in contract["keys"]}
    assert kinds == {"master", "exp_avg", "exp_avg_sq", "buffer"}


def test_engine_loaded_into_another_seed_goes_on_bit_equal(contract):
    assert contract["loaded_state_equal"]
    # The first loss after a load is the one that stale copies of the weights would spoil.
    assert contract["after_load"] == contract["after"]


def test_engine_nonfinite_gradient_of_one_rank_is_skipped_by_all(contract):
    assert contract["poisoned"]
    assert contract["poison_left_state"]
    assert not contract["after_poison"][0]["skipped"]
    assert math.isfinite(contract["after_poison"][0]["loss"])


def test_engine_first_loss_is_the_uniform_one(contract):
    assert contract["losses"][0]["loss"] == pytest.approx(math.log(300), rel=0.05)


def test_engines_agree_on_the_loss_curve_whatever_the_strategy_and_split(tmp_path):
    curves = {
        (strategy, world, micro): run_ranks(
            "losses", tmp_path, strategy=strategy, world=world, micro=micro
        )["losses"]
        for strategy, world, micro in [
            ("ddp", 1, 12), ("ddp", 2, 3), ("zero3", 1, 4), ("zero3", 2, 6), ("zero3", 3, 1),
        ]
    }  # fmt: skip
    reference = curves["ddp", 1, 12]
    for name, curve in curves.items():
        for ours, theirs in zip(curve, reference, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6), name
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), name


def test_engines_restore_each_others_checkpoints_at_any_world_size(tmp_path):
    saved = {s: run_ranks("save", tmp_path, strategy=s) for s in STRATEGIES}
    assert all(s["committed"] for s in saved.values())
    for strategy, world in [("zero3", 3), ("ddp", 1), ("zero3", 2)]:
        found = run_ranks("resume", tmp_path, strategy=strategy, world=world)
        for saved_by in STRATEGIES:
            for ours, theirs in zip(found[saved_by], saved[saved_by]["next"], strict=True):
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
            read, total = found[f"{saved_by}-bytes"]
            # Small objects are read whole for their checksums: twice at most per object.
            assert read <= total * (world + 1)
        if (strategy, world) == ("zero3", 2):
            assert found["zero3"] == saved["zero3"]["next"]
