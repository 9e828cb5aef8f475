# SPDX-License-Identifier: Apache-2.0
"""Maps the leaves of a DeepSpeed tree onto fields of RunConfig, one section at a time."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raydist.config.deepspeed import default_leaves, extra_leaves, owner_of
from raydist.config.deepspeed_check import Problem, as_json, nest, no_effect
from raydist.config.deepspeed_keys import AUTO, NATIVE_AUTO, RULES
from raydist.config.run import RunConfig
from raydist.errors import ConfigError

_GLOBAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_LR = "optimizer.params.lr"

# Source: deepspeed 0.19.8, runtime/lr_schedules.py: the schedules, and what each one takes.
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULE_PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
_EVERY_SCHEDULE = ("warmup_num_steps", "warmup_type", "last_batch_iteration")


class Setting(NamedTuple):
    """One setting of the file: its path, its value, and where it went or came from."""

    path: str
    value: Any
    target: str


def get_field(config: RunConfig, key: str) -> Any:
    """Return a field by its dotted key, or None where the text is no key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def world_problem(config: RunConfig, expected: int | None, world_size: int) -> Problem | None:
    """Return what is wrong where a file's batch fields imply another number of ranks."""
    if expected is None or expected == world_size:
        return None
    total, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    steps = total // (micro * expected)
    return Problem(
        _STEPS,
        f"{_GLOBAL}={total}, {_MICRO}={micro} and {_STEPS}={steps} mean {expected} ranks; "
        f"this run has {world_size}",
        f'Write {_STEPS} as "auto", or {_GLOBAL} as {micro * steps * world_size}, '
        f"or set scaling.workers={expected}.",
    )


@dataclass(kw_only=True, slots=True)
class Reader:
    """Takes leaves off the file one field at a time; what is left is DeepSpeed's own."""

    base: RunConfig
    sections: frozenset[str]
    leaves: dict[str, Any]
    problems: list[Problem]
    changes: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    mapped: list[Setting] = field(default_factory=list)
    passed: list[Setting] = field(default_factory=list)
    resolved: list[Setting] = field(default_factory=list)

    def _refuse(self, path: str, reason: str, correction: str) -> None:
        self.problems.append(Problem(path, reason, correction))

    def _is_refused(self, *paths: str) -> bool:
        return any(problem.path in paths for problem in self.problems)

    def _resolve(self, path: str, value: object, why: str) -> None:
        self.resolved.append(Setting(path, value, why))

    def _change(self, path: str, value: object, key: str, new: object) -> None:
        self.mapped.append(Setting(path, value, key))
        self.changes[key] = new

    def _current(self, key: str) -> Any:
        return self.changes.get(key, get_field(self.base, key))

    def _holds(self, section: str) -> bool:
        return any(path.startswith(section + ".") for path in self.leaves)

    def _read(self, path: str, key: str) -> Any:
        """Map one path onto one key; return its value, None where it is absent or "auto"."""
        value = self.leaves.pop(path, None)
        if value == AUTO:
            self._resolve(path, self._current(key), f"{key}, as the recipe has it")
            return None
        if value is not None:
            self._change(path, value, key, value)
        return value

    def read_batch(self) -> int | None:
        """Map the batch; return the world size that it implies, if it does.

        With accumulation and scaling.workers known, a size that the file leaves open is derived
        as DeepSpeed would; otherwise the recipe's holds.
        """
        given = {path: self.leaves.pop(path, None) for path in (_GLOBAL, _MICRO, _STEPS)}
        known = {path: value for path, value in given.items() if value not in (None, AUTO)}
        steps, workers = known.get(_STEPS), self.base.scaling.planned_workers
        derived: dict[str, int] = {}
        if steps and workers:
            micro = known.get(_MICRO, self.base.batch.micro_batch_size)
            if _GLOBAL not in known:
                derived[_GLOBAL] = micro * steps * workers
            elif _MICRO not in known and known[_GLOBAL] % (steps * workers) == 0:
                derived[_MICRO] = known[_GLOBAL] // (steps * workers)
        for path, key in ((_GLOBAL, "batch.global_batch_size"), (_MICRO, "batch.micro_batch_size")):
            if path in derived:
                self.changes[key] = derived[path]
                self._resolve(path, derived[path], f"from {_STEPS} and scaling.workers={workers}")
            elif path in known:
                self._change(path, known[path], key, known[path])
            elif given[path] == AUTO or (path == _GLOBAL and known):
                self._resolve(path, self._current(key), f"{key}, as the recipe has it")
        if given[_STEPS] == AUTO:
            self._resolve(_STEPS, None, "derived from the batch when the ranks are known")
        return self._read_expected_world(steps) if steps else None

    def _read_expected_world(self, steps: int) -> int | None:
        total = self._current("batch.global_batch_size")
        micro = self._current("batch.micro_batch_size")
        if total % (micro * steps) == 0:
            expected = total // (micro * steps)
            self.mapped.append(Setting(_STEPS, steps, f"checked: {expected} ranks"))
            return expected
        if not self._is_refused(_GLOBAL, _MICRO):
            self._refuse(
                _STEPS,
                f"{_MICRO}={micro} x {_STEPS}={steps} does not divide {_GLOBAL}={total}, so no "
                "number of ranks fits",
                f'Write {_STEPS} as "auto": raydist derives it.',
            )
        return None

    def read_precision(self) -> None:
        """Map bf16 and fp16 onto the one precision."""
        bf16, fp16 = self.leaves.pop("bf16.enabled", None), self.leaves.pop("fp16.enabled", None)
        own = self.base.precision
        if fp16 is True:
            if bf16 is True:
                self._refuse("bf16.enabled", "bf16 and fp16 are both on", "Leave fp16 out.")
            elif own == "bf16":
                self._refuse("fp16.enabled", "the run has precision=bf16", "Keep one of the two.")
            return
        if fp16 is not None:
            entry = Setting("fp16.enabled", False, "precision")
            (self.resolved if fp16 == AUTO else self.mapped).append(entry)
        if bf16 == AUTO:
            self._resolve("bf16.enabled", own == "bf16", f"precision={own}, as the recipe has it")
        elif bf16 is None:
            self._resolve("bf16.enabled", own == "bf16", f"not in the file; precision={own}")
        else:
            self._change("bf16.enabled", bf16, "precision", "bf16" if bf16 else "fp32")
        dtype = self.leaves.pop("data_types.param_dtype", None)
        if dtype not in (None, AUTO, self._current("precision")):
            self._refuse(
                "data_types.param_dtype",
                f"{as_json(dtype)} is not the precision of the run, {self._current('precision')}",
                "Leave it out.",
            )
        elif dtype is not None:
            self._resolve("data_types.param_dtype", self._current("precision"), "precision")

    def read_strategy(self) -> None:
        """Map the ZeRO stage and the offload devices."""
        path = "zero_optimization.stage"
        is_section = "zero_optimization" in self.sections
        stage = self.leaves.pop(path, None)
        if stage == AUTO or (stage is None and not is_section):
            stands = 3 if self.base.strategy == "zero3" else 0
            self._resolve(path, stands, f"strategy={self.base.strategy}, as the recipe has it")
        elif stage == 3:
            self._change(path, stage, "strategy", "zero3")
        elif stage is None:
            if not self._is_refused(path, "zero_optimization"):
                self._refuse(path, "missing, which DeepSpeed takes as stage 0", 'Add "stage": 3.')
        elif stage == 0:
            self._refuse(
                path,
                "stage 0 is plain data parallelism, which raydist runs without DeepSpeed",
                "Set strategy=ddp and give no DeepSpeed configuration.",
            )
        else:
            self._refuse(
                path,
                f"{stage} is not possible: this version has stage 3 (strategy=zero3) and "
                "strategy=ddp",
                'Write "stage": 3.',
            )
        for name, old, key in (
            ("offload_optimizer", "cpu_offload", "zero.offload_optimizer"),
            ("offload_param", "cpu_offload_param", "zero.offload_parameters"),
        ):
            device = self._read(f"zero_optimization.{name}.device", key)
            path = f"zero_optimization.{old}"
            value = self.leaves.pop(path, None)
            if value == AUTO:
                self._resolve(path, None, f"left out; {key} decides")
            elif value is not None and device is not None:
                self._refuse(path, f"it is {name}.device by an older name", "Keep one of them.")
            elif value is not None:
                self._change(path, value, key, "cpu" if value else "none")

    def read_optimizer(self) -> None:
        """Map the optimizer and gradient clipping; name what the file leaves to the recipe."""
        if not self._holds("optimizer"):
            self._read_clipping()
            return
        kind = self.leaves.pop("optimizer.type", None)
        if kind is None:
            if not self._is_refused("optimizer.type"):
                self._refuse("optimizer.type", "it is missing", 'Add "type": "AdamW".')
        elif kind != AUTO and kind.lower() not in ("adam", "adamw"):
            self._refuse(
                "optimizer.type",
                f"{as_json(kind)} is not possible: raydist trains with AdamW",
                'Write "AdamW".',
            )
        else:
            name = "AdamW" if kind == AUTO else kind
            entry = Setting("optimizer.type", name, "raydist's optimizer is AdamW")
            (self.resolved if kind == AUTO else self.mapped).append(entry)
        stated = {path for path in self.leaves if path.startswith("optimizer.params.")}
        self._read(_LR, "optimizer.learning_rate")
        self._read("optimizer.params.eps", "optimizer.eps")
        self._read("optimizer.params.weight_decay", "optimizer.weight_decay")
        self._read_betas()
        own = self.base.optimizer
        for name, value in (
            ("lr", own.learning_rate),
            ("betas", [own.beta1, own.beta2]),
            ("eps", own.eps),
            ("weight_decay", own.weight_decay),
        ):
            if f"optimizer.params.{name}" not in stated:
                self._resolve(f"optimizer.params.{name}", value, "not in the file; the recipe's")
        self._read_clipping()

    def _read_betas(self) -> None:
        path = "optimizer.params.betas"
        betas = self.leaves.pop(path, None)
        if betas == AUTO:
            own = self.base.optimizer
            self._resolve(path, [own.beta1, own.beta2], "optimizer.beta1 and beta2 of the recipe")
            return
        if betas is None:
            return
        fits = len(betas) == 2 and all(
            isinstance(b, (int, float)) and not isinstance(b, bool) for b in betas
        )
        if not fits:
            self._refuse(path, f"{as_json(betas)} is not two numbers", "Write [0.9, 0.95].")
            return
        for beta, key in zip(betas, ("optimizer.beta1", "optimizer.beta2"), strict=True):
            self._change(path, betas, key, beta)

    def _read_clipping(self) -> None:
        path, key = "gradient_clipping", "optimizer.max_grad_norm"
        norm = self.leaves.get(path)
        if norm == 0:
            self._change(path, self.leaves.pop(path), key, None)
        else:
            self._read(path, key)

    def read_schedule(self) -> None:
        """Map the learning-rate schedule; runs after read_optimizer, which may set the peak."""
        if not self._holds("scheduler"):
            return
        prefix = "scheduler.params."
        kind = self.leaves.pop("scheduler.type", None)
        if kind == AUTO:
            own = self.base.optimizer.schedule
            kind = next(name for name, schedule in _SCHEDULES.items() if schedule == own)
            self._resolve("scheduler.type", kind, f"optimizer.schedule={own}, as the recipe has it")
        elif kind in _SCHEDULES:
            self._change("scheduler.type", kind, "optimizer.schedule", _SCHEDULES[kind])
            if kind == "WarmupDecayLR":
                self._change("scheduler.type", kind, "optimizer.min_learning_rate_ratio", 0.0)
        else:
            near = difflib.get_close_matches(str(kind), _SCHEDULES, n=1)
            if not self._is_refused("scheduler.type"):
                self._refuse(
                    "scheduler.type",
                    "it is missing" if kind is None else f"{as_json(kind)} is not possible",
                    f"Write {' or '.join(near or _SCHEDULES)}.",
                )
            self.leaves = {p: v for p, v in self.leaves.items() if not p.startswith(prefix)}
            return
        known = (*_SCHEDULE_PARAMS[kind], *_EVERY_SCHEDULE)
        for path in [p for p in self.leaves if p.startswith(prefix)]:
            if path.removeprefix(prefix) not in known:
                self.leaves.pop(path)
                self._refuse(path, f"{kind} does not take it", f"It takes {', '.join(known)}.")
        self._read_warmup(kind)
        if "total_num_steps" in known:
            self._read_total()
        self._read(f"{prefix}cos_min_ratio", "optimizer.min_learning_rate_ratio")

    def _read_warmup(self, kind: str) -> None:
        steps = "scheduler.params.warmup_num_steps"
        if steps not in self.leaves:
            own = self.base.optimizer.warmup_steps
            self._resolve(steps, own, "not in the file; optimizer.warmup_steps of the recipe")
        self._read(steps, "optimizer.warmup_steps")
        shape = "scheduler.params.warmup_type"
        if shape not in self.leaves:
            self._resolve(shape, "linear", "not in the file; DeepSpeed's would be log")
        peak = "scheduler.params.warmup_max_lr"
        highest, rate = self.leaves.get(peak), self.changes.get("optimizer.learning_rate")
        if highest not in (None, AUTO) and rate not in (None, highest):
            self.leaves.pop(peak)
            self._refuse(
                peak,
                f"{as_json(highest)} contradicts {_LR}={as_json(rate)}, and {kind} takes the first",
                "Write the same number in both, or leave one out.",
            )
        self._read(peak, "optimizer.learning_rate")

    def _read_total(self) -> None:
        path, key = "scheduler.params.total_num_steps", "optimizer.decay_steps"
        total = self.leaves.pop(path, None)
        if total in (None, AUTO):
            self.changes[key] = None
            self._resolve(path, self.base.num_steps, "num_steps of the run")
        else:
            self._change(path, total, key, total)

    def read_rest(self) -> None:
        """Pass on what is left, or resolve it where it says "auto"."""
        zero = replace(
            self.base.zero,
            offload_optimizer=self._current("zero.offload_optimizer"),
            offload_parameters=self._current("zero.offload_parameters"),
        )
        defaults = default_leaves(replace(self.base, strategy="zero3", zero=zero))
        for path, value in self.leaves.items():
            rule, owner = RULES.get(path), owner_of(path)
            if value == AUTO and isinstance(value, str):
                self._read_auto(path, defaults)
            elif rule and value not in rule.allowed:
                continue  # refused by the walk
            elif owner:
                is_fp16 = path.startswith("fp16.")
                target = "not read: fp16 is off" if is_fp16 else "already so"
                self.mapped.append(Setting(path, value, target))
            else:
                note = no_effect(path)
                target = f"zero.extra, without effect: {note}" if note else "zero.extra"
                self.passed.append(Setting(path, value, target))
                self.extra[path] = value

    def _read_auto(self, path: str, defaults: Mapping[str, Any]) -> None:
        rule = RULES.get(path)
        if rule and rule.allowed:
            self._resolve(path, rule.allowed[0], "the value that raydist works with")
        elif path in defaults:
            self._resolve(path, defaults[path], "raydist's choice for this model")
        elif path in NATIVE_AUTO:
            self._resolve(path, None, "left out: DeepSpeed chooses, its default")
        elif owner_of(path):
            self._resolve(path, None, f"left out: {owner_of(path)} decides")
        else:
            self._refuse(
                path, '"auto" cannot be resolved here', "Write the value, or leave it out."
            )

    def apply(self) -> RunConfig | None:
        """Return the run with all changes, or None after noting why there is none.

        Raises:
            ConfigError: The recipe's own zero.extra cannot go to DeepSpeed.
        """
        if self.extra:
            kept = extra_leaves(self.base) | self.extra
            self.changes["zero.extra"] = nest(kept)
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.changes.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, {})[name] = value
        top = sections.pop("", {})
        for section, values in sections.items():
            try:
                top[section] = replace(getattr(self.base, section), **values)
            except ConfigError as error:
                self._refuse_field(section, error)
        try:
            return replace(self.base, **top)
        except ConfigError as error:
            self._refuse_field("configuration", error)
            return None

    def _refuse_field(self, section: str, error: ConfigError) -> None:
        """Note a field that its own section refuses, under the paths that set it."""
        paths = [s.path for s in self.mapped if s.target in error.problem]
        reason = error.problem.removesuffix(".")
        self._refuse(", ".join(dict.fromkeys(paths)) or section, reason, error.way_out)
