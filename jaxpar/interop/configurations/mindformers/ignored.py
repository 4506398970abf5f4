"""Keys of MindFormers that change no result here, by reason, and keys that only one value of is built."""

from __future__ import annotations

from jaxpar.interop.configurations.keys import NeutralKeys

_GENERATION = "for generation: jaxpar generate has options of its own"
_FUSED = "XLA fuses operations"
_DTYPE = "computed in float32"

TOP_IGNORED = {
    "set data.source, which reads other formats": "train_dataset train_dataset_task",
    "train.eval_every evaluates": "eval_dataset eval_dataset_task eval_callbacks do_eval eval_step_interval "
    "eval_epoch_interval metric",
    "MindFormers classes": "processor trainer use_legacy",
    "for Ascend devices and MindSpore's compiler": "context exclude_cann_cpu",
    "for the profiler": "profile profile_start_step profile_stop_step init_start_profile profile_communication "
    "profile_memory profile_rank_ids profile_pipeline profile_level profiler_level mstx monitor_config",
    "checkpoints reshard": "auto_trans_ckpt transform_process_num src_strategy_path_or_dir only_save_strategy "
    "load_ckpt_format load_ckpt_async",
    "checkpoints hold each piece once": "remove_redundancy save_file",
    "for MindSpore's data loader": "auto_tune filepath_prefix autotune_per_step",
    "layer_scale and lr_scale are off": "layer_decay lr_scale_factor",
    "set output": "remote_save_url save_checkpoint_path",
    "checkpoint.resume resumes": "resume_training ignore_data_skip data_skip_steps",
    "every run is deterministic": "train_precision_sync infer_precision_sync",
    _GENERATION: "input_data predict_batch_size adapter_id",
}
TOP_NEUTRAL: NeutralKeys = (
    ("load_checkpoint", ("",), "MindSpore checkpoints are not read. Import Hugging Face weights: jaxpar import"),
    ("pretrained_model_dir", ("",), "the sizes must stand in the file"),
    ("layer_scale lr_scale", (False,), "learning rates are equal in all layers"),
)
PARALLEL_IGNORED = {
    "gradients are those of the mean loss": "gradients_mean loss_repeated_mean",
    "each process reads its own rows": "full_batch",
    "parallel_mode is not 2": "search_mode auto_parallel_search_mode",
    "XLA chooses the collectives": "enable_alltoall",
    "checkpoints describe their layout": "strategy_ckpt_save_file strategy_ckpt_load_file strategy_ckpt_config "
    "group_ckpt_save_file",
    "the product of the sizes": "device_num",
    "all processes create the same parameters": "parameter_broadcast",
}
PARALLEL_CONFIG_IGNORED = {
    "XLA combines collectives; parallel.fusion sets sizes": "gradient_aggregation_group",
    "replaced by parallel.enable_parallel_optimizer in MindFormers": "optimizer_shard",
    "a cost of MindSpore's search": "mem_coeff",
    "parallel.parallel_mode decides": "auto_parallel",
    "recompute_config decides": "recompute",
}
MODEL_IGNORED = {
    "model.family follows from the sizes": "type model_type architectures auto_map",
    "names, no sizes": "auto_register _name_or_path transformers_version torch_dtype",
    "token ids are those of the data": "bos_token_id eos_token_id pad_token_id ignore_token_id tokenizer_class",
    _GENERATION: "use_past max_decode_length top_k top_p do_sample temperature repetition_penalty use_cache block_size "
    "num_blocks max_new_tokens is_dynamic chunk_prefill parallel_decoding_params llm_backend use_past_shard",
    _DTYPE: "layernorm_compute_type layernorm_compute_dtype softmax_compute_type softmax_compute_dtype "
    "attention_softmax_in_fp32 rotary_dtype",
    "computed in model.dtype": "residual_dtype res_dtype fp32_residual_connection",
    "theta is the base": "rotary_emb_base",
    "stored in model.param_dtype": "embedding_init_type",
    _FUSED: "bias_dropout_fusion use_fused_rope use_fused_swiglu fused_rms_norm fused_kernel use_fused_ops_permute "
    "use_fused_ops_topkrouter rmsnorm_compute_2d qkv_concat mla_qkv_concat use_contiguous_weight_layout input_layout",
    "causal attention, in tiles": "use_flash_attention use_attn_mask_compression sparse_mode use_rope_slice "
    "attention_pre_tokens attention_next_tokens use_attention_mask mask_func_type",
    "rotary positions have no limit": "max_position_embedding max_position_embeddings",
    "weights start at 1/√width": "initializer_range init_method_std embedding_init_method_std",
    "other keys set it": "batch_size input_sliced_sig parallel_optimizer",
    "the loss is a mean": "return_extra_loss return_hidden_states calculate_per_token_loss",
    "the loss is computed in float32": "fp16_lm_cross_entropy",
    "load_checkpoint decides": "checkpoint_name_or_path",
}
MODEL_NEUTRAL: NeutralKeys = (
    ("hidden_act activation_func", ("silu", "swiglu", "fusedswiglu"), "the MLP is a SwiGLU"),
    ("gated_linear_unit", (True,), "the MLP is a SwiGLU"),
    ("normalization", ("RMSNorm", "FusedRMSNorm"), "norms are RMSNorms"),
    ("add_bias_linear attn_proj_has_bias mlp_has_bias", (False,), "linear layers have no biases"),
    ("position_embedding_type", ("rope",), "positions are rotary"),
    ("rotary_pct rotary_percent", (1.0,), "all numbers of a head are rotated"),
    ("rope_interleave multi_latent_attention", (False, True), ""),
    ("use_alibi_mask", (False,), "positions are rotary"),
    ("use_eod_attn_mask_compression use_eod_reset", (False,), "set data.packing, which separates documents"),
    ("apply_residual_connection_post_layernorm sandwich_norm", (False,), "norms come before attention and MLP"),
    ("use_3d_tensor_parallel", (False,), "tensor parallelism has one dim"),
    ("quant_config quantization_config", ({},), "weights are not quantized"),
    ("pipeline_stage", ({},), "a model has all stages of the mesh"),
)
MOE_IGNORED = {
    "score, groups and normalize decide": "routing_policy topk_method moe_router_pre_softmax",
    _DTYPE: "router_dense_type moe_router_dtype",
    "XLA schedules communication and compute": "comp_comm_parallel comp_comm_parallel_degree moe_shared_expert_overlap",
    "model.dispatch decides": "group_wise_a2a use_allgather_dispatcher enable_deredundency npu_nums_per_device "
    "ep_extend_tp moe_enable_deepep moe_token_dispatcher_type dispatch_global_max_bs",
    _FUSED: "use_fused_ops_topkrouter use_fused_ops_permute moe_permute_fusion",
    "no expert needs padding": "enable_gmm_safe_tokens use_pad_tokens max_router_load moe_pad_expert_input_to_capacity",
    "tokens are dropped in their order, if at all": "enable_sdrop moe_token_drop_policy",
    "always recorded": "save_token_distribution callback_moe_droprate moe_per_layer_logging",
    "no expert is copied": "cur_layer update_step hot_expert_num cold_token_percent",
    "no effect here": "moe_module_name expert_group_size moe_init_method_std",
}
MOE_NEUTRAL: NeutralKeys = (
    ("enable_cold_hot_expert", (False,), "no expert is copied"),
    ("use_shared_expert_gating", (False,), "shared experts have no gate"),
    ("moe_apply_probs_on_input", (False,), "outputs of experts are weighted"),
    ("moe_input_jitter_eps", (0.0,), "routers have no noise"),
    ("moe_layer_freq", (1,), "all layers after the dense ones have experts"),
    ("expert_model_parallel", (1,), "experts are sharded by model_parallel"),
)
