"""Keys of MindFormers that change no result here, with the reason, and keys that only one value of is built."""

from __future__ import annotations

from typing import Any

type NeutralKeys = tuple[tuple[str, tuple[Any, ...], str], ...]

_GENERATION = "for generation: jaxpar generate has options of its own"
_TOKENS = "token ids are those of the data"
_FUSED = "XLA fuses operations"
_SCHEDULED = "XLA schedules communication and compute"
_PROFILE = "for the profiler"
_ASCEND = "for Ascend devices and MindSpore's compiler"
_DTYPE = "computed in float32"

TOP_IGNORED = {
    **dict.fromkeys(("train_dataset", "train_dataset_task"), "set data.source, which reads other formats"),
    **dict.fromkeys(("eval_dataset", "eval_dataset_task", "eval_callbacks"), "train.eval_every evaluates"),
    **dict.fromkeys(("do_eval", "eval_step_interval", "eval_epoch_interval", "metric"), "train.eval_every evaluates"),
    **dict.fromkeys(("processor", "trainer", "use_legacy"), "MindFormers classes"),
    "context": _ASCEND,
    "exclude_cann_cpu": _ASCEND,
    **dict.fromkeys(("profile", "profile_start_step", "profile_stop_step", "init_start_profile"), _PROFILE),
    **dict.fromkeys(("profile_communication", "profile_memory", "profile_rank_ids", "profile_pipeline"), _PROFILE),
    **dict.fromkeys(("profile_level", "profiler_level", "mstx", "monitor_config"), _PROFILE),
    **dict.fromkeys(("auto_trans_ckpt", "transform_process_num", "src_strategy_path_or_dir"), "checkpoints reshard"),
    **dict.fromkeys(("only_save_strategy", "load_ckpt_format", "load_ckpt_async"), "checkpoints reshard"),
    **dict.fromkeys(("remove_redundancy", "save_file"), "checkpoints hold each piece once"),
    **dict.fromkeys(("auto_tune", "filepath_prefix", "autotune_per_step"), "for MindSpore's data loader"),
    **dict.fromkeys(("layer_decay", "lr_scale_factor"), "layer_scale and lr_scale are off"),
    **dict.fromkeys(("remote_save_url", "save_checkpoint_path"), "set output"),
    **dict.fromkeys(("resume_training", "ignore_data_skip", "data_skip_steps"), "checkpoint.resume resumes"),
    **dict.fromkeys(("train_precision_sync", "infer_precision_sync"), "every run is deterministic"),
    **dict.fromkeys(("input_data", "predict_batch_size", "adapter_id"), _GENERATION),
}
TOP_NEUTRAL: NeutralKeys = (
    ("load_checkpoint", ("",), "MindSpore checkpoints are not read. Import Hugging Face weights: jaxpar import"),
    ("pretrained_model_dir", ("",), "the sizes must stand in the file"),
    ("layer_scale", (False,), "learning rates are equal in all layers"),
    ("lr_scale", (False,), "learning rates are equal in all layers"),
)
PARALLEL_IGNORED = {
    "gradients_mean": "gradients are those of the mean loss",
    "loss_repeated_mean": "gradients are those of the mean loss",
    "full_batch": "each process reads its own rows",
    "search_mode": "parallel_mode is not 2",
    "enable_alltoall": "XLA chooses the collectives",
    "strategy_ckpt_save_file": "checkpoints describe their layout",
    "strategy_ckpt_load_file": "checkpoints describe their layout",
    "strategy_ckpt_config": "checkpoints describe their layout",
    "group_ckpt_save_file": "checkpoints describe their layout",
    "device_num": "the product of the sizes",
    "parameter_broadcast": "all processes create the same parameters",
    "auto_parallel_search_mode": "parallel_mode is not 2",
}
PARALLEL_CONFIG_IGNORED = {
    "gradient_aggregation_group": "XLA combines collectives; parallel.fusion sets sizes",
    "optimizer_shard": "replaced by parallel.enable_parallel_optimizer in MindFormers",
    "mem_coeff": "a cost of MindSpore's search",
    "auto_parallel": "parallel.parallel_mode decides",
    "recompute": "recompute_config decides",
}
MODEL_IGNORED = {
    **dict.fromkeys(("type", "model_type", "architectures", "auto_map"), "model.family follows from the sizes"),
    **dict.fromkeys(("auto_register", "_name_or_path", "transformers_version", "torch_dtype"), "names, no sizes"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "ignore_token_id", "tokenizer_class"), _TOKENS),
    **dict.fromkeys(("use_past", "max_decode_length", "top_k", "top_p", "do_sample", "temperature"), _GENERATION),
    **dict.fromkeys(("repetition_penalty", "use_cache", "block_size", "num_blocks", "max_new_tokens"), _GENERATION),
    **dict.fromkeys(("is_dynamic", "chunk_prefill", "parallel_decoding_params", "llm_backend"), _GENERATION),
    **dict.fromkeys(("layernorm_compute_type", "layernorm_compute_dtype", "softmax_compute_type"), _DTYPE),
    **dict.fromkeys(("softmax_compute_dtype", "attention_softmax_in_fp32", "rotary_dtype"), _DTYPE),
    **dict.fromkeys(("residual_dtype", "res_dtype", "fp32_residual_connection"), "computed in model.dtype"),
    "rotary_emb_base": "theta is the base",
    "use_past_shard": _GENERATION,
    "embedding_init_type": "stored in model.param_dtype",
    **dict.fromkeys(("use_fused_rope", "use_fused_swiglu", "fused_rms_norm", "fused_kernel"), _FUSED),
    **dict.fromkeys(("use_fused_ops_permute", "use_fused_ops_topkrouter", "rmsnorm_compute_2d"), _FUSED),
    **dict.fromkeys(("qkv_concat", "mla_qkv_concat", "use_contiguous_weight_layout", "input_layout"), _FUSED),
    **dict.fromkeys(("use_flash_attention", "use_attn_mask_compression", "sparse_mode"), "causal attention, in tiles"),
    **dict.fromkeys(("use_rope_slice", "attention_pre_tokens", "attention_next_tokens"), "causal attention, in tiles"),
    **dict.fromkeys(("use_attention_mask", "mask_func_type"), "causal attention, in tiles"),
    **dict.fromkeys(("max_position_embedding", "max_position_embeddings"), "rotary positions have no limit"),
    **dict.fromkeys(("initializer_range", "init_method_std", "embedding_init_method_std"), "weights start at 1/√width"),
    **dict.fromkeys(("batch_size", "input_sliced_sig", "parallel_optimizer"), "other keys set it"),
    **dict.fromkeys(("return_extra_loss", "return_hidden_states", "calculate_per_token_loss"), "the loss is a mean"),
    "fp16_lm_cross_entropy": "the loss is computed in float32",
    "checkpoint_name_or_path": "load_checkpoint decides",
}
MODEL_NEUTRAL: NeutralKeys = (
    ("hidden_act", ("silu", "swiglu", "fusedswiglu"), "the MLP is a SwiGLU"),
    ("activation_func", ("silu", "swiglu", "fusedswiglu"), "the MLP is a SwiGLU"),
    ("gated_linear_unit", (True,), "the MLP is a SwiGLU"),
    ("normalization", ("RMSNorm", "FusedRMSNorm"), "norms are RMSNorms"),
    ("add_bias_linear", (False,), "linear layers have no biases"),
    ("attn_proj_has_bias", (False,), "linear layers have no biases"),
    ("mlp_has_bias", (False,), "linear layers have no biases"),
    ("hidden_dropout", (0.0,), "there is no dropout"),
    ("attention_dropout", (0.0,), "there is no dropout"),
    ("emb_dropout_prob", (0.0,), "there is no dropout"),
    ("position_embedding_type", ("rope",), "positions are rotary"),
    ("rotary_pct", (1.0,), "all numbers of a head are rotated"),
    ("rotary_percent", (1.0,), "all numbers of a head are rotated"),
    ("rope_interleave", (False, True), ""),
    ("use_alibi_mask", (False,), "positions are rotary"),
    ("use_eod_attn_mask_compression", (False,), "set data.packing, which separates documents"),
    ("use_eod_reset", (False,), "set data.packing, which separates documents"),
    ("apply_residual_connection_post_layernorm", (False,), "norms come before attention and MLP"),
    ("sandwich_norm", (False,), "norms come before attention and MLP"),
    ("use_3d_tensor_parallel", (False,), "tensor parallelism has one dim"),
    ("quant_config", ({},), "weights are not quantized"),
    ("quantization_config", ({},), "weights are not quantized"),
    ("pipeline_stage", ({},), "a model has all stages of the mesh"),
    ("multi_latent_attention", (False, True), ""),
)
MOE_IGNORED = {
    **dict.fromkeys(("routing_policy", "topk_method", "moe_router_pre_softmax"), "score, groups and normalize decide"),
    **dict.fromkeys(("router_dense_type", "moe_router_dtype"), _DTYPE),
    **dict.fromkeys(("comp_comm_parallel", "comp_comm_parallel_degree", "moe_shared_expert_overlap"), _SCHEDULED),
    **dict.fromkeys(("group_wise_a2a", "use_allgather_dispatcher", "enable_deredundency"), "model.dispatch decides"),
    **dict.fromkeys(("npu_nums_per_device", "ep_extend_tp", "moe_enable_deepep"), "model.dispatch decides"),
    **dict.fromkeys(("moe_token_dispatcher_type", "dispatch_global_max_bs"), "model.dispatch decides"),
    **dict.fromkeys(("use_fused_ops_topkrouter", "use_fused_ops_permute", "moe_permute_fusion"), _FUSED),
    **dict.fromkeys(("enable_gmm_safe_tokens", "use_pad_tokens", "max_router_load"), "no expert needs padding"),
    **dict.fromkeys(("enable_sdrop", "moe_token_drop_policy"), "tokens are dropped in their order, if at all"),
    **dict.fromkeys(("save_token_distribution", "callback_moe_droprate", "moe_per_layer_logging"), "always recorded"),
    **dict.fromkeys(("cur_layer", "update_step", "hot_expert_num", "cold_token_percent"), "no expert is copied"),
    **dict.fromkeys(("moe_module_name", "expert_group_size", "moe_init_method_std"), "no effect here"),
    "moe_pad_expert_input_to_capacity": "no expert needs padding",
}
MOE_NEUTRAL: NeutralKeys = (
    ("enable_cold_hot_expert", (False,), "no expert is copied"),
    ("use_shared_expert_gating", (False,), "shared experts have no gate"),
    ("moe_apply_probs_on_input", (False,), "outputs of experts are weighted"),
    ("moe_input_jitter_eps", (0.0,), "routers have no noise"),
    ("moe_layer_freq", (1,), "all layers after the dense ones have experts"),
    ("expert_model_parallel", (1,), "experts are sharded by model_parallel"),
)
