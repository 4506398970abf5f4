"""Keys of DeepSpeed that change no result here, by reason, and features that are not built."""

from __future__ import annotations

_TORCH = "for PyTorch modules"
_SCHEDULED = "XLA schedules communication and compute"

TOP_IGNORED = {
    "metrics.jsonl and TensorBoard are always written": "steps_per_print wall_clock_breakdown memory_breakdown "
    "dump_state log_level tensorboard wandb csv_monitor comet comms_logger monitor_config",
    "for the profiler": "flops_profiler vocabulary_size",
    "jaxpar plan searches": "autotuning compile graph_harvesting disable_allgather",
    "see checkpoint": "checkpoint nebula use_node_local_storage load_universal_checkpoint",
    "any optimizer can be sharded": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "gradients are those of the mean loss": "prescale_gradients gradient_predivide_factor",
    "no effect on the result": "sparse_gradients managed_gradient_accumulation aio pipeline",
    "sums are in float32": "seq_parallel_communication_data_type data_types",
    "all batches are full": "dataloader_drop_last use_data_before_expert_parallelism",
}
FEATURES = {
    "set fp16 or bf16": "amp",
    "not built": "progressive_layer_drop eigenvalue quantize_training compression_training curriculum_learning "
    "data_efficiency hybrid_engine expert_parallel",
    "supervise.elastic continues with the remaining processes": "elasticity",
}
"""Sections with a switch ``enabled``."""
ZERO_IGNORED = {
    "XLA combines collectives; parallel.fusion sets sizes": "reduce_bucket_size allgather_bucket_size "
    "contiguous_gradients sub_group_size use_multi_rank_bucket_allreduce stage3_prefetch_bucket_size "
    "prefetch_bucket_size",
    "XLA chooses the collectives": "reduce_scatter allgather_partitions round_robin_gradients "
    "stage3_use_all_reduce_for_fetch_params legacy_stage1 mics_hierarchical_params_gather",
    _SCHEDULED: "overlap_comm stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
    "max_reuse_distance stage3_allgather_sequential",
    _TORCH: "stage3_module_granularity_threshold leaf_module memory_efficient_linear "
    "override_module_apply ignore_unused_parameters enable_sanity_checks log_trace_cache_warnings "
    "stage3_model_persistence_threshold",
    "see checkpoint": "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint",
    "jaxpar export writes full weights": "stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save",
    "host memory is always pinned": "cpu_offload_use_pin_memory",
    "for the optimizer Muon": "save_muon_momentum_buffer_in_memory",
}
TENSOR_IGNORED = {
    _TORCH: "tp_grain_size tp_overlap_comm dtype injection_policy_tuple keep_module_on_host",
    "rules shard the weights": "partition_config preset_model replace_with_kernel_inject",
}
OPTIMIZER_IGNORED = {
    "no effect on the result": "torch_adam fused cuda_aware comm_backend_name foreach max_coeff min_coeff"
}
OFFLOAD_IGNORED = {
    "host memory is always pinned": "pin_memory",
    "XLA schedules the copies": "buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write fast_init "
    "super_offload cpuadam_cores_perc",
}
CHECKPOINTING_IGNORED = {
    _SCHEDULED: "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    "every layer recomputes, or none": "number_checkpoints",
}
