"""Arguments of Megatron-LM that change no result here, with the reason, and arguments with one built value."""

from __future__ import annotations

from typing import Any

_LOGS = "metrics.jsonl and TensorBoard are always written"
_CHECKPOINTS = "checkpoints reshard, and hold everything"
_DATA = "set data.source"
_SCHEDULED = "XLA schedules communication and compute"
_FUSED = "XLA fuses operations"
_CUDA = "for CUDA and PyTorch"

PREFIXES = {
    **dict.fromkeys(("--log-", "--tensorboard-", "--wandb-", "--timing-", "--profile", "--record-memory"), _LOGS),
    **dict.fromkeys(
        ("--no-load-", "--no-save-", "--ckpt-", "--dist-ckpt-", "--async-", "--use-dist-ckpt"), _CHECKPOINTS
    ),
    **dict.fromkeys(("--no-ckpt-", "--use-persistent-ckpt", "--auto-detect-ckpt", "--use-checkpoint-"), _CHECKPOINTS),
    **dict.fromkeys(("--tokenizer-", "--data-", "--split", "--merge-file", "--vocab-file", "--per-split-"), _DATA),
    **dict.fromkeys(("--train-data-", "--valid-data-", "--test-data-", "--num-dataset-", "--tiktoken-"), _DATA),
    **dict.fromkeys(("--no-create-attention-mask", "--no-mmap-", "--dataloader-", "--mock-data"), _DATA),
    **dict.fromkeys(
        ("--overlap-", "--no-overlap-", "--delay-", "--align-", "--tp-comm-", "--disable-tp-comm-"), _SCHEDULED
    ),
    **dict.fromkeys(("--ddp-", "--defer-", "--batch-p2p", "--no-align-", "--suggested-communication-"), _SCHEDULED),
    **dict.fromkeys(("--rerun-", "--error-injection-", "--check-", "--no-check-", "--exit-", "--ft-"), "see supervise"),
    **dict.fromkeys(("--straggler-", "--disable-straggler-", "--adlr-"), "see supervise"),
    **dict.fromkeys(
        ("--manual-gc", "--empty-unused-", "--distributed-", "--nccl-", "--use-nccl", "--local-rank"), _CUDA
    ),
    **dict.fromkeys(("--cuda-graph", "--external-cuda-graph", "--enable-cuda-graph", "--te-", "--fp8-param-"), _CUDA),
    **dict.fromkeys(
        ("--fp8-amax-", "--fp8-margin", "--fp8-interval", "--fp8-recipe", "--high-priority-"), "scales are current"
    ),
    **dict.fromkeys(("--no-gradient-accumulation-fusion", "--cross-entropy-", "--no-persist-layer-norm"), _FUSED),
}
"""Arguments by the beginning of their names."""
IGNORED = {
    **dict.fromkeys(
        ("--save", "--load", "--save-retain-interval", "--finetune"), "set output, checkpoint and train.init_from"
    ),
    **dict.fromkeys(("--num-workers", "--reset-position-ids", "--eod-mask-loss"), _DATA),
    **dict.fromkeys(("--use-mcore-models", "--use-legacy-models", "--transformer-impl", "--spec", "--use-te"), _CUDA),
    **dict.fromkeys(("--attention-backend", "--use-flash-attn", "--attention-softmax-in-fp32"), "attention in tiles"),
    **dict.fromkeys(("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"), _FUSED),
    **dict.fromkeys(("--no-bias-dropout-fusion", "--no-rope-fusion", "--apply-rope-fusion"), _FUSED),
    **dict.fromkeys(("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"), _FUSED),
    **dict.fromkeys(
        ("--moe-token-dispatcher-type", "--moe-enable-deepep", "--moe-flex-dispatcher-backend"), "model.dispatch"
    ),
    **dict.fromkeys(("--moe-shared-expert-overlap", "--moe-pad-expert-input-to-capacity"), _SCHEDULED),
    **dict.fromkeys(("--moe-per-layer-logging", "--moe-router-dtype", "--moe-token-drop-policy"), "no effect here"),
    **dict.fromkeys(("--init-method-std", "--max-position-embeddings", "--no-position-embedding"), "no effect here"),
    **dict.fromkeys(
        ("--use-rotary-position-embeddings", "--apply-layernorm-1p", "--use-cpu-initialization"), "no effect here"
    ),
    **dict.fromkeys(
        ("--no-query-key-layer-scaling", "--embedding-init-method-std", "--init-method-xavier-uniform"),
        "no effect here",
    ),
    **dict.fromkeys(("--make-vocab-size-divisible-by", "--padded-vocab-size"), "the vocabulary is not padded"),
    **dict.fromkeys(("--calculate-per-token-loss", "--accumulate-allreduce-grads-in-fp32"), "the default here"),
    **dict.fromkeys(("--decoupled-weight-decay", "--lazy-mpu-init", "--use-ring-exchange-p2p"), "the default here"),
    **dict.fromkeys(
        ("--deterministic-mode", "--barrier-with-L1-time", "--sequence-parallel-fallback"), "the default here"
    ),
    **dict.fromkeys(("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"), "see train.init_from"),
    **dict.fromkeys(
        ("--use-precision-aware-optimizer", "--main-params-dtype", "--main-grads-dtype"), "state is float32"
    ),
    "--hybrid-context-parallel": "load_balance decides",
}
NEUTRAL: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("--tokenizer-padding", (), "not built"),
    ("--expert-tensor-parallel-size", (), "experts are sharded like other weights"),
    ("--account-for-embedding-in-pipeline-split", (), "set parallel.pipeline.layers_per_stage"),
    ("--account-for-loss-in-pipeline-split", (), "set parallel.pipeline.layers_per_stage"),
    ("--pipeline-model-parallel-layout", (), "set parallel.pipeline.layers_per_stage"),
    ("--rampup-batch-size", (), "the batch size is constant"),
    ("--step-batch-size-schedule", (), "the batch size is constant"),
    ("--decoupled-lr", (), "one learning rate for all weights"),
    ("--decoupled-min-lr", (), "one learning rate for all weights"),
    ("--lr-warmup-init", (0, 0.0), "the rate grows from 0"),
    ("--start-weight-decay", (), "weight decay is constant"),
    ("--end-weight-decay", (), "weight decay is constant"),
    ("--weight-decay-incr-style", ("constant",), "weight decay is constant"),
    ("--cpu-offloading", (), "offload_names of parallel.remat"),
    ("--cpu-offloading-num-layers", (0,), "offload_names of parallel.remat"),
    ("--optimizer-offload-fraction", (1, 1.0), "all of the state is offloaded"),
    ("--fp4-format", (), "not built"),
)
MODEL_NEUTRAL: tuple[tuple[str, tuple[Any, ...], Any, str], ...] = (
    ("--normalization", ("RMSNorm",), "LayerNorm", "norms are RMSNorms"),
    ("--position-embedding-type", ("rope",), "learned_absolute", "positions are rotary"),
    ("--rotary-percent", (1, 1.0), 1.0, "all numbers of a head are rotated"),
    ("--attention-dropout", (0, 0.0), 0.1, "there is no dropout"),
    ("--hidden-dropout", (0, 0.0), 0.1, "there is no dropout"),
    ("--swiglu", (True,), False, "the MLP is a SwiGLU"),
    ("--disable-bias-linear", (True,), False, "linear layers have no biases"),
)
"""Arguments of the model, their built values, their default and the reason."""
