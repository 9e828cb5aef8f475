"""What ranks do in the engine tests; started by torchrun, one process a rank, real gloo.

    torchrun --nproc-per-node W engine_scenarios.py SCENARIO FOLDER STRATEGY PRECISION

Rank 0 writes its findings to FOLDER/SCENARIO-STRATEGY-PRECISION-W.json.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from raydist.train.environment import quiet_libraries, select_accelerator

select_accelerator()
quiet_libraries()

import torch  # noqa: E402

from raydist.checkpoint.attempt import open_attempt  # noqa: E402
from raydist.checkpoint.journal import Journal  # noqa: E402
from raydist.checkpoint.manifest import Progress  # noqa: E402
from raydist.checkpoint.ranges import check_cover  # noqa: E402
from raydist.checkpoint.restore import restore  # noqa: E402
from raydist.checkpoint.saver import RunIdentity, Saver  # noqa: E402
from raydist.checkpoint.snapshot import Snapshot  # noqa: E402
from raydist.clock import SystemClock  # noqa: E402
from raydist.config import (  # noqa: E402
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from raydist.storage import open_store  # noqa: E402
from raydist.train.job import Job  # noqa: E402
from raydist.train.rendezvous import (  # noqa: E402
    TorchGroup,
    choose_device,
    join,
    world_from_environment,
)
from raydist.world import plan_batch  # noqa: E402

GLOBAL_BATCH, LENGTH, VOCABULARY = 12, 16, 300


class Net(torch.nn.Module):
    """An embedding, a bias, odd shapes that no world size divides, and a buffer that is state."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 17)
        self.norm = torch.nn.LayerNorm(17)
        self.inner = torch.nn.Linear(17, 23)
        self.out = torch.nn.Linear(23, VOCABULARY)
        self.register_buffer("scale", torch.full((5,), 1.0))

    def forward(self, tokens):
        hidden = torch.tanh(self.inner(self.norm(self.embed(tokens))))
        return self.out(hidden * self.scale.mean().to(hidden.dtype))


def build_model(config):
    return Net()


def loss_fn(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def config_for(strategy, precision, seed=1):
    return RunConfig(
        name="engine",
        num_steps=100,
        seed=seed,
        strategy=strategy,
        precision=precision,
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        ),
        batch=BatchConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=0),
        data=DataConfig(source="x", sequence_length=LENGTH),
    )


class Rank:
    """One rank: its engine, and batches that depend on the step alone."""

    def __init__(self, strategy, precision, micro=1, seed=1):
        self.world = world_from_environment(os.environ)
        os.environ["LOCAL_SIZE"] = str(self.world.local_world_size)
        self.device = choose_device(self.world)
        join(
            self.world,
            device=self.device,
            store=None,
            timeout_s=60,
            with_deepspeed=strategy == "zero3",
        )
        self.group = TorchGroup(60)
        self.plan = plan_batch(
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=micro,
            world_size=self.world.world_size,
        )
        self.config = config_for(strategy, precision, seed)
        self.engine = self.build()

    def build(self, seed=None):
        config = self.config if seed is None else dataclasses.replace(self.config, seed=seed)
        job = Job(recipes=[lambda: config], build_model=build_model, loss_fn=loss_fn)
        if config.strategy == "zero3":
            from raydist.train.zero import ZeroEngine as Engine
        else:
            from raydist.train.ddp import DdpEngine as Engine
        return Engine(job, config, self.plan, self.device)

    def steps(self, first, last, engine=None, poison=None):
        results = []
        for step in range(first, last):
            tokens = torch.randint(
                VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
            )
            micro_batches = []
            for positions in self.plan.positions(start=0, rank=self.world.rank):
                micro_batches.append({"tokens": tokens[positions.start : positions.stop]})
            if poison == step:
                self.poison(engine or self.engine)
            result = (engine or self.engine).step(micro_batches, learning_rate=0.01)
            results.append(dataclasses.asdict(result))
        return results

    def poison(self, engine):
        """Make the next gradients of one rank non-finite, as a bad batch would."""
        if self.world.rank == self.world.world_size - 1:
            original = engine._loss_fn

            def bad(model, batch):
                engine._loss_fn = original
                return original(model, batch) * float("nan")

            engine._loss_fn = bad

    def saver(self, folder):
        store = open_store(str(folder))
        attempt = None
        if self.world.is_main:
            attempt = open_attempt(run="engine", store=store, driver="t", clock=SystemClock())
        number = self.group.broadcast(attempt.number if attempt else None)
        identity = RunIdentity(
            run="engine",
            strategy=self.config.strategy,
            precision=self.config.precision,
            config_hash="",
            corpus="",
            versions={},
        )
        saver = Saver(
            store=store,
            group=self.group,
            attempt_number=number,
            attempt=attempt,
            identity=identity,
            max_abandoned=1,
        )
        return saver, attempt


def snapshot(engine, fill=0):
    buffers = {w.spec.key: memoryview(bytearray([fill]) * w.nbytes) for w in engine.wanted()}
    scalars = engine.export(buffers)
    return {key: bytes(data) for key, data in buffers.items()}, scalars


def contract(rank, folder):
    """Every promise of the protocol that one world can show."""
    found = {"losses": rank.steps(0, 4)}
    before, scalars = snapshot(rank.engine)
    mine = {w.spec.key: (w.offset, w.length, w.spec.shape) for w in rank.engine.wanted()}
    # Bytes that export leaves alone would differ between two fillings.
    found["wanted_is_exported"] = before == snapshot(rank.engine, fill=0xFF)[0]
    gathered = rank.group.broadcast(rank.group.gather(mine))
    for key, (_, _, shape) in mine.items():
        numel = int(torch.tensor(shape).prod()) if shape else 1
        check_cover(key, numel, [g[key][:2] for g in gathered])
    found["keys"] = sorted(mine)
    found["after"] = rank.steps(4, 7)

    fresh = rank.build(seed=99)
    fresh.load({k: memoryview(bytearray(v)) for k, v in before.items()}, scalars)
    found["loaded_state_equal"] = snapshot(fresh)[0] == before
    found["after_load"] = rank.steps(4, 7, engine=fresh)

    state = snapshot(fresh)[0]
    poisoned = rank.steps(7, 8, engine=fresh, poison=7)
    found["poisoned"] = poisoned[0]["skipped"]
    found["poison_left_state"] = snapshot(fresh)[0] == state
    found["after_poison"] = rank.steps(8, 9, engine=fresh)
    return found


def save(rank, folder):
    """Train, save, and say what the next steps would be."""
    rank.steps(0, 4)
    saver, attempt = rank.saver(folder / f"run-{rank.config.strategy}")
    taken = Snapshot(rank.engine.wanted())
    scalars = rank.engine.export(taken.views)
    outcome = saver.persist(
        taken,
        scalars=scalars,
        progress=Progress(step=4, data_position=48, epoch=0, tokens=0, skipped_steps=0),
    )
    if attempt is not None:
        attempt.close("finished")
    return {"committed": outcome.committed, "next": rank.steps(4, 7)}


def resume(rank, folder):
    """Restore what another world or strategy saved, and go on."""
    found = {}
    for saved_by in ("zero3", "ddp"):
        store = open_store(str(folder / f"run-{saved_by}"))
        commit = Journal(store).newest_commit(Journal(store).tail()) if rank.world.is_main else None
        engine = rank.build(seed=99)
        restored = restore(
            store=store, group=rank.group, commit=commit, wanted=lambda m, e=engine: e.wanted()
        )
        engine.load(restored.buffers, restored.manifest.scalars)
        found[saved_by] = rank.steps(4, 7, engine=engine)
        read = rank.group.broadcast(rank.group.gather(restored.bytes_read))
        found[f"{saved_by}-bytes"] = (sum(read), restored.manifest.total_bytes)
    return found


def losses(rank, folder):
    """The loss curve alone, for comparing strategies and splits."""
    return {"losses": rank.steps(0, 6)}


def main():
    scenario, folder, strategy, precision, micro = sys.argv[1:6]
    rank = Rank(strategy, precision, micro=int(micro))
    scenarios = {"contract": contract, "save": save, "resume": resume, "losses": losses}
    found = scenarios[scenario](rank, Path(folder))
    if rank.world.is_main:
        name = f"{scenario}-{strategy}-{precision}-{rank.world.world_size}-{micro}.json"
        Path(folder, name).write_text(json.dumps(found))
    rank.group.broadcast(None)
    os._exit(0)  # as a rank does: gloo threads may abort the interpreter while it ends


if __name__ == "__main__":
    main()
