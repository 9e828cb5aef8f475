# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.19.8 reads from its JSON: every key, what may stand there, what may not.

Data only; deepspeed_check.py walks over it. A key is named by its dotted path.
Source: deepspeed 0.19.8, runtime/config.py, runtime/zero/config.py and the models they name;
tests/unit/config/test_deepspeed_config.py holds this table to those models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

AUTO = "auto"

# Kinds of value. "any" is not looked into, except for "auto"; a nested table is a section;
# the key "*" in a section lets keys pass that are not listed.
_OFFLOAD = {"device": "text", "nvme_path": "text", "buffer_count": "count", "pin_memory": "bool"}
_LOG_FILES = {"enabled": "bool", "output_path": "text", "job_name": "text"}

KNOWN: dict[str, Any] = {
    "train_batch_size": "positive",
    "train_micro_batch_size_per_gpu": "positive",
    "gradient_accumulation_steps": "positive",
    "managed_gradient_accumulation": "bool",
    "optimizer": {
        "type": "text",
        "legacy_fusion": "bool",
        "params": {
            "lr": "number",
            "betas": "list",
            "eps": "number",
            "weight_decay": "number",
            "torch_adam": "bool",
            "adam_w_mode": "bool",
            "bias_correction": "bool",
            "amsgrad": "bool",
            "max_grad_norm": "number",
        },
    },
    "scheduler": {
        "type": "text",
        "params": {
            "warmup_min_lr": "number",
            "warmup_max_lr": "number",
            "warmup_num_steps": "count",
            "warmup_type": "text",
            "total_num_steps": "positive",
            "warmup_min_ratio": "ratio",
            "cos_min_ratio": "ratio",
            "last_batch_iteration": "integer",
        },
    },
    "gradient_clipping": "number",
    "bf16": {
        "enabled": "bool",
        "immediate_grad_update": "bool",
        "check_grad_overflow": "bool",
        "bf16_master_weights_and_grads": "bool",
        "bf16_optimizer_states": "bool",
    },
    "fp16": {
        "enabled": "bool",
        "auto_cast": "bool",
        "loss_scale": "number",
        "initial_scale_power": "integer",
        "loss_scale_window": "count",
        "hysteresis": "count",
        "consecutive_hysteresis": "bool",
        "min_loss_scale": "number",
        "fp16_master_weights_and_grads": "bool",
    },
    "torch_autocast": {"enabled": "bool", "dtype": "text", "lower_precision_safe_modules": "list"},
    "data_types": {
        "grad_accum_dtype": "text",
        "param_dtype": "text",
        "buffer_dtype": "text",
        "keep_in_fp32_modules": "any",
    },
    "zero_optimization": {
        "stage": "integer",
        "contiguous_gradients": "bool",
        "reduce_scatter": "bool",
        "reduce_bucket_size": "positive",
        "use_multi_rank_bucket_allreduce": "bool",
        "allgather_partitions": "bool",
        "allgather_bucket_size": "count",
        "overlap_comm": "bool",
        "compute_grad_norm": "bool",
        "load_from_fp32_weights": "bool",
        "elastic_checkpoint": "bool",
        "offload_param": _OFFLOAD | {"buffer_size": "count", "max_in_cpu": "count"},
        "offload_optimizer": _OFFLOAD
        | {
            "pipeline_read": "bool",
            "pipeline_write": "bool",
            "fast_init": "bool",
            "ratio": "ratio",
            "super_offload": "bool",
            "cpuadam_cores_perc": "ratio",
        },
        "zenflow": {
            "topk_ratio": "ratio",
            "select_strategy": "text",
            "select_interval": "positive",
            "update_interval": "positive",
            "overlap_step": "bool",
            "offload": "bool",
            "auto_ratio": "ratio",
            "full_warm_up_rounds": "count",
            "pt_reserved_cores_perc": "ratio",
            "steps_per_epoch": "positive",
        },
        "sub_group_size": "count",
        "cpu_offload_param": "bool",
        "cpu_offload_use_pin_memory": "bool",
        "cpu_offload": "bool",
        "stage3_prefetch_bucket_size": "count",
        "stage3_param_persistence_threshold": "count",
        "stage3_model_persistence_threshold": "count",
        "stage3_max_live_parameters": "count",
        "stage3_max_reuse_distance": "count",
        "stage3_gather_16bit_weights_on_model_save": "bool",
        "stage3_module_granularity_threshold": "count",
        "stage3_use_all_reduce_for_fetch_params": "bool",
        "stage3_allgather_sequential": "bool",
        "ignore_unused_parameters": "bool",
        "legacy_stage1": "bool",
        "round_robin_gradients": "bool",
        "parameter_alignment": "bool",
        "zero_hpz_partition_size": "count",
        "zero_quantized_weights": "bool",
        "zero_quantized_nontrainable_weights": "bool",
        "zero_quantized_gradients": "bool",
        "memory_efficient_linear": "bool",
        "pipeline_loading_checkpoint": "bool",
        "override_module_apply": "bool",
        "log_trace_cache_warnings": "bool",
        "enable_sanity_checks": "bool",
        "save_muon_momentum_buffer_in_memory": "bool",
        "leaf_module": {"classes": "any", "names": "any", "name_suffixes": "any"},
    },
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "communication_data_type": "text",
    "seq_parallel_communication_data_type": "text",
    "prescale_gradients": "bool",
    "gradient_predivide_factor": "number",
    "gradient_allreduce_op": "text",
    "disable_allgather": "bool",
    "steps_per_print": "positive",
    "wall_clock_breakdown": "bool",
    "memory_breakdown": "bool",
    "dump_state": "bool",
    "disable_python_gc": "bool",
    "log_level": "text",
    "vocabulary_size": "positive",
    "dataloader_drop_last": "bool",
    "sequence_parallel_size": "positive",
    "use_data_before_expert_parallelism": "bool",
    "activation_checkpointing": {
        "partition_activations": "bool",
        "number_checkpoints": "positive",
        "contiguous_memory_optimization": "bool",
        "cpu_checkpointing": "bool",
        "profile": "bool",
        "synchronize_checkpoint_boundary": "bool",
    },
    "comms_logger": {
        "enabled": "bool",
        "prof_all": "bool",
        "prof_ops": "list",
        "verbose": "bool",
        "debug": "bool",
    },
    "flops_profiler": {
        "enabled": "bool",
        "recompute_fwd_factor": "number",
        "profile_step": "positive",
        "module_depth": "integer",
        "top_modules": "positive",
        "detailed": "bool",
        "output_file": "text",
    },
    "aio": {
        "block_size": "positive",
        "queue_depth": "positive",
        "intra_op_parallelism": "positive",
        "single_submit": "bool",
        "overlap_events": "bool",
        "use_gds": "bool",
    },
    "tensorboard": _LOG_FILES,
    "csv_monitor": _LOG_FILES,
    "wandb": {"enabled": "bool", "group": "text", "team": "text", "project": "text"},
    "comet": {
        "enabled": "bool",
        "samples_log_interval": "positive",
        "project": "text",
        "workspace": "text",
        "api_key": "text",
        "experiment_name": "text",
        "experiment_key": "text",
        "online": "bool",
        "mode": "text",
    },
    "checkpoint": {
        "tag_validation": "text",
        "checkpoint_serialization": "bool",
        "load_universal": "bool",
        "use_node_local_storage": "bool",
        "parallel_write": {"pipeline_stage": "bool"},
        "writer": {
            "type": "text",
            "io_buffer_size": "positive",
            "io_buffer_double": "bool",
            "io_multiplier": "positive",
            "show_statistics": "bool",
            "data_parallel": "text",
            "decoupled": "bool",
        },
    },
    "compile": {
        "deepcompile": "bool",
        "autoep_non_moe": "bool",
        "free_activation": "bool",
        "free_activation_threshold": "count",
        "offload_activation": "bool",
        "offload_activation_pin_memory": "bool",
        "offload_opt_states": "bool",
        "double_buffer": "bool",
        "symmetric_memory": "bool",
        "debug_log": "bool",
        "offload_parameters": "bool",
        "sync_before_reduce": "bool",
        "sync_after_reduce": "bool",
        "sync_before_allgather": "bool",
        "sync_after_allgather": "bool",
        "keep_int_input_tensors": "bool",
        "keep_all_input_tensors": "bool",
        "passes": "list",
    },
    "timers": {"throughput": {"enabled": "bool", "synchronized": "bool"}},
    "pipeline": {"stages": "any", "*": "any"},
    "tensor_parallel": {"autotp_size": "count", "*": "any"},
    "expert_parallel": {"enabled": "bool", "*": "any"},
    "hybrid_engine": {"enabled": "bool", "*": "any"},
    "data_efficiency": {"enabled": "bool", "*": "any"},
    "autotuning": {"enabled": "bool", "*": "any"},
    "weight_quantization": {"*": "any"},
    "datastates_ckpt": "any",
}

# Second spellings that DeepSpeed accepts -> the one that raydist writes.
_ZERO3_FIELDS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
} | {f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _ZERO3_FIELDS}

# Keys that older versions took and 0.19.8 does not -> what to do instead.
# Source: deepspeed 0.19.8 runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS and
# _REMOVED_ZERO_CONFIG_KEYS (tracking issue DeepSpeed#8489, elastic removal #8563).
REMOVED: dict[str, str] = {
    "elasticity": "Delete it: batch.global_batch_size holds when raydist's world size changes.",
    "nebula": "Delete it: raydist uploads checkpoints behind the next steps by itself.",
    "amp": 'Delete it, and write "bf16": {"enabled": true}.',
    "compression_training": "Delete it: nothing replaces it.",
    "quantize_training": "Delete it: nothing replaces it.",
    "sparse_gradients": "Delete it: an embedding built with sparse=True needs no key.",
    "eigenvalue": "Delete it: it served quantize_training only.",
    "sparse_attention": "Delete it: the model chooses its attention.",
    "graph_harvesting": "Delete it: nothing replaces it.",
    "curriculum_learning": "Delete it: raydist orders the data (data.shuffle).",
    "progressive_layer_drop": "Delete it: nothing replaces it.",
    "zero_optimization.mics_shard_size": (
        "Delete it; zero_optimization.zero_hpz_partition_size keeps a copy within a node."
    ),
    "zero_optimization.mics_hierarchical_params_gather": "Delete it: it served MiCS only.",
    "zero_optimization.zeropp_loco_param": (
        "Delete it: zero_optimization.zero_quantized_gradients works without."
    ),
}

# Names that DeepSpeed ignores without a word -> the name it reads.
RENAMED: dict[str, str] = {
    "aio.thread_count": "aio.intra_op_parallelism",
    "activation_checkpointing.partitioned_activations": (
        "activation_checkpointing.partition_activations"
    ),
    "optimizer.params.learning_rate": "optimizer.params.lr",
    "bf16.check_overflow": "bf16.check_grad_overflow",
}


class Rule(NamedTuple):
    """The values that one path may hold, and what to say of any other."""

    allowed: tuple[Any, ...]
    reason: str
    correction: str


RULES: dict[str, Rule] = {
    "managed_gradient_accumulation": Rule(
        (True,), "raydist leaves accumulation to the engine", "Leave it out."
    ),
    "optimizer.params.adam_w_mode": Rule(
        (True,), "raydist's weight decay is decoupled (AdamW)", "Leave it out."
    ),
    "optimizer.params.bias_correction": Rule(
        (True,), "raydist's AdamW corrects the bias", "Leave it out."
    ),
    "optimizer.params.amsgrad": Rule(
        (False,), "raydist keeps two moments for each parameter", "Leave it out."
    ),
    "optimizer.params.max_grad_norm": Rule(
        (), "DeepSpeed does not clip by it", "Write it as gradient_clipping."
    ),
    "scheduler.params.warmup_type": Rule(
        ("linear",), "raydist's warm-up is linear", 'Write "linear".'
    ),
    "scheduler.params.warmup_min_lr": Rule(
        (0,), "raydist's warm-up starts at 0", "Write 0, or leave it out."
    ),
    "scheduler.params.warmup_min_ratio": Rule(
        (0,), "raydist's warm-up starts at 0", "Write 0, or leave it out."
    ),
    "scheduler.params.last_batch_iteration": Rule(
        (-1,), "raydist restores the step from its checkpoints", "Leave it out."
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Rule(
        (),
        "DeepSpeed no longer reads it",
        "Write pin_memory in offload_optimizer or offload_param.",
    ),
    "fp16.enabled": Rule(
        (False,),
        "this version computes in fp32 and bf16 (precision)",
        'Write "bf16": {"enabled": true} instead, or leave fp16 out for fp32.',
    ),
    "torch_autocast.enabled": Rule(
        (False,),
        "precision says what the arithmetic is",
        'Write "bf16": {"enabled": true} instead.',
    ),
    "bf16.bf16_master_weights_and_grads": Rule(
        (False,), "master weights are always fp32", "Leave it out."
    ),
    "bf16.bf16_optimizer_states": Rule((False,), "optimizer state is always fp32", "Leave it out."),
    "zero_optimization.offload_param.device": Rule(
        ("none", "cpu"), "this version offloads to host memory only", 'Write "cpu" or "none".'
    ),
    "zero_optimization.offload_optimizer.device": Rule(
        ("none", "cpu"), "this version offloads to host memory only", 'Write "cpu" or "none".'
    ),
    "zero_optimization.compute_grad_norm": Rule(
        (True,), "DeepSpeed takes false with stages 1 and 2 only", "Leave it out."
    ),
    "zero_optimization.elastic_checkpoint": Rule(
        (False,),
        "DeepSpeed has no elastic checkpoints for stage 3",
        "Leave it out: raydist resumes on any world size.",
    ),
    "zero_allow_untested_optimizer": Rule(
        (True,), "raydist hands DeepSpeed its own AdamW", "Leave it out."
    ),
    "zero_force_ds_cpu_optimizer": Rule(
        (False,), "raydist hands DeepSpeed its own AdamW", "Leave it out."
    ),
    "gradient_allreduce_op": Rule(
        ("mean",), "stage 3 averages gradients over ranks", "Leave it out."
    ),
    "comet.api_key": Rule(
        (), "the configuration is stored with the run", "Set COMET_API_KEY in the environment."
    ),
    "sequence_parallel_size": Rule((1,), "this version is data-parallel only", "Leave it out."),
    "tensor_parallel.autotp_size": Rule(
        (0, 1), "this version is data-parallel only", "Leave it out."
    ),
    "expert_parallel.enabled": Rule(
        (False,), "this version is data-parallel only", "Leave it out."
    ),
    "hybrid_engine.enabled": Rule((False,), "this version trains only", "Leave it out."),
    "data_efficiency.enabled": Rule(
        (False,), "raydist decides which sample comes when", "Leave it out."
    ),
    "autotuning.enabled": Rule(
        (False,), "it needs DeepSpeed's own launcher", "Leave it out; see raydist plan."
    ),
}

# Accepted, but nothing in a raydist run reads it; a path stands for all below it.
NO_EFFECT: dict[str, str] = {
    "checkpoint": "raydist writes its own checkpoints",
    "datastates_ckpt": "raydist writes its own checkpoints",
    "dataloader_drop_last": "raydist feeds the batches",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "no 16-bit copy is gathered at a save; the checkpoint has the fp32 weights"
    ),
    "activation_checkpointing": "read by deepspeed.checkpointing only",
    "pipeline": "read by PipelineModule only",
    "compile": "read by engine.compile() only",
    "zero_optimization.allgather_partitions": "read by stages 1 and 2 only",
    "zero_optimization.allgather_bucket_size": "read by stages 1 and 2 only",
    "zero_optimization.round_robin_gradients": "read by stages 1 and 2 only",
    "zero_optimization.ignore_unused_parameters": "read by stage 2 only",
    "zero_optimization.legacy_stage1": "read by stage 1 only",
    "zero_optimization.parameter_alignment": "read by stages 1 and 2 only",
    "zero_optimization.use_multi_rank_bucket_allreduce": "read by stages 1 and 2 only",
}

# Where "auto" is a value that DeepSpeed itself knows, and also its default.
NATIVE_AUTO = (
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
)
