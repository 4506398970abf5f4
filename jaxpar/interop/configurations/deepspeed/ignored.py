"""Keys of DeepSpeed that change no result here, with the reason, and features that are not built."""

from __future__ import annotations

_BUCKETS = "XLA combines collectives; parallel.fusion sets sizes"
_SCHEDULED = "XLA schedules communication and compute"
_LOGS = "metrics.jsonl and TensorBoard are always written"
_TORCH = "for PyTorch modules"
_COPIES = "XLA schedules the copies"

TOP_IGNORED = {
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"), _LOGS),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "monitor_config"), _LOGS),
    **dict.fromkeys(("flops_profiler", "vocabulary_size"), "for the profiler"),
    **dict.fromkeys(("autotuning", "compile", "graph_harvesting", "disable_allgather"), "jaxpar plan searches"),
    **dict.fromkeys(("checkpoint", "nebula", "use_node_local_storage", "load_universal_checkpoint"), "see checkpoint"),
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "any optimizer can be sharded"),
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), "gradients are those of the mean loss"),
    **dict.fromkeys(("sparse_gradients", "managed_gradient_accumulation"), "no effect on the result"),
    **dict.fromkeys(("seq_parallel_communication_data_type", "data_types"), "sums are in float32"),
    **dict.fromkeys(("dataloader_drop_last", "use_data_before_expert_parallelism"), "all batches are full"),
    **dict.fromkeys(("aio", "pipeline"), "no effect on the result"),
}
FEATURES = {
    **dict.fromkeys(("amp",), "set fp16 or bf16"),
    **dict.fromkeys(("progressive_layer_drop", "eigenvalue", "quantize_training", "compression_training"), "not built"),
    **dict.fromkeys(("curriculum_learning", "data_efficiency", "hybrid_engine", "expert_parallel"), "not built"),
    "elasticity": "supervise.elastic continues with the remaining processes",
}
"""Sections with a switch ``enabled``."""
ZERO_IGNORED = {
    **dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients", "sub_group_size"), _BUCKETS
    ),
    **dict.fromkeys(
        ("use_multi_rank_bucket_allreduce", "stage3_prefetch_bucket_size", "prefetch_bucket_size"), _BUCKETS
    ),
    **dict.fromkeys(("reduce_scatter", "allgather_partitions", "round_robin_gradients"), "XLA chooses the collectives"),
    **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "legacy_stage1"), "XLA chooses the collectives"),
    **dict.fromkeys(("overlap_comm", "stage3_max_live_parameters", "max_live_parameters"), _SCHEDULED),
    **dict.fromkeys(("stage3_max_reuse_distance", "max_reuse_distance", "stage3_allgather_sequential"), _SCHEDULED),
    **dict.fromkeys(("stage3_module_granularity_threshold", "leaf_module", "memory_efficient_linear"), _TORCH),
    **dict.fromkeys(("override_module_apply", "ignore_unused_parameters", "enable_sanity_checks"), _TORCH),
    **dict.fromkeys(("log_trace_cache_warnings", "stage3_model_persistence_threshold"), _TORCH),
    **dict.fromkeys(("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"), "see checkpoint"),
    **dict.fromkeys(("stage3_gather_16bit_weights_on_model_save",), "jaxpar export writes full weights"),
    **dict.fromkeys(("stage3_gather_fp16_weights_on_model_save",), "jaxpar export writes full weights"),
    "mics_hierarchical_params_gather": "XLA chooses the collectives",
    "cpu_offload_use_pin_memory": "host memory is always pinned",
    "save_muon_momentum_buffer_in_memory": "for the optimizer Muon",
}
OFFLOAD_IGNORED = {
    "pin_memory": "host memory is always pinned",
    **dict.fromkeys(
        ("buffer_count", "buffer_size", "max_in_cpu", "pipeline", "pipeline_read", "pipeline_write"), _COPIES
    ),
    **dict.fromkeys(("fast_init", "super_offload", "cpuadam_cores_perc"), _COPIES),
}
CHECKPOINTING_IGNORED = {
    **dict.fromkeys(("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"), _SCHEDULED),
    "number_checkpoints": "every layer recomputes, or none",
}
