"""Arguments of Megatron-LM that change no result here, by reason, and arguments with one built value."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.keys import NeutralKeys

_DATA = "set data.source"
_SCHEDULED = "XLA schedules communication and compute"
_FUSED = "XLA fuses operations"
_CUDA = "for CUDA and PyTorch"

PREFIXES = {
    "metrics.jsonl and TensorBoard are always written": "--log- --tensorboard- --wandb- --timing- --profile "
    "--record-memory",
    "checkpoints reshard, and hold everything": "--no-load- --no-save- --ckpt- --dist-ckpt- --async- --use-dist-ckpt "
    "--no-ckpt- --use-persistent-ckpt --auto-detect-ckpt --use-checkpoint-",
    _DATA: "--tokenizer- --data- --split --merge-file --vocab-file --per-split- --train-data- --valid-data- "
    "--test-data- --num-dataset- --tiktoken- --no-create-attention-mask --no-mmap- --dataloader- --mock-data",
    _SCHEDULED: "--overlap- --no-overlap- --delay- --align- --tp-comm- --disable-tp-comm- --ddp- --defer- --batch-p2p "
    "--no-align- --suggested-communication-",
    "see supervise": "--rerun- --error-injection- --check- --no-check- --exit- --ft- --straggler- --disable-straggler- "
    "--adlr-",
    _CUDA: "--manual-gc --empty-unused- --distributed- --nccl- --use-nccl --local-rank --cuda-graph "
    "--external-cuda-graph --enable-cuda-graph --te- --fp8-param-",
    "scales are current": "--fp8-amax- --fp8-margin --fp8-interval --fp8-recipe --high-priority-",
    _FUSED: "--no-gradient-accumulation-fusion --cross-entropy- --no-persist-layer-norm",
}
"""Arguments by the beginning of their names."""
IGNORED = {
    "set output, checkpoint and train.init_from": "--save --load --save-retain-interval --finetune",
    _DATA: "--num-workers --reset-position-ids --eod-mask-loss",
    _CUDA: "--use-mcore-models --use-legacy-models --transformer-impl --spec --use-te",
    "attention in tiles": "--attention-backend --use-flash-attn --attention-softmax-in-fp32",
    _FUSED: "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --apply-rope-fusion --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion",
    "model.dispatch": "--moe-token-dispatcher-type --moe-enable-deepep --moe-flex-dispatcher-backend",
    _SCHEDULED: "--moe-shared-expert-overlap --moe-pad-expert-input-to-capacity",
    "no effect here": "--moe-per-layer-logging --moe-router-dtype --moe-token-drop-policy --init-method-std "
    "--max-position-embeddings --no-position-embedding --use-rotary-position-embeddings --apply-layernorm-1p "
    "--use-cpu-initialization --no-query-key-layer-scaling --embedding-init-method-std --init-method-xavier-uniform",
    "the vocabulary is not padded": "--make-vocab-size-divisible-by --padded-vocab-size",
    "the default here": "--calculate-per-token-loss --accumulate-allreduce-grads-in-fp32 --decoupled-weight-decay "
    "--lazy-mpu-init --use-ring-exchange-p2p --deterministic-mode --barrier-with-L1-time --sequence-parallel-fallback",
    "see train.init_from": "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
    "state is float32": "--use-precision-aware-optimizer --main-params-dtype --main-grads-dtype",
    "load_balance decides": "--hybrid-context-parallel",
}
NEUTRAL: NeutralKeys = (
    ("--tokenizer-padding --fp4-format", (), "not built"),
    ("--expert-tensor-parallel-size", (), "experts are sharded like other weights"),
    ("--account-for-embedding-in-pipeline-split", (), "set parallel.pipeline.layers_per_stage"),
    ("--account-for-loss-in-pipeline-split", (), "set parallel.pipeline.layers_per_stage"),
    ("--pipeline-model-parallel-layout", (), "set parallel.pipeline.layers_per_stage"),
    ("--rampup-batch-size --step-batch-size-schedule", (), "the batch size is constant"),
    ("--decoupled-lr --decoupled-min-lr", (), "one learning rate for all weights"),
    ("--lr-warmup-init", (0, 0.0), "the rate grows from 0"),
    ("--start-weight-decay --end-weight-decay", (), "weight decay is constant"),
    ("--weight-decay-incr-style", ("constant",), "weight decay is constant"),
    ("--cpu-offloading", (), "offload_names of parallel.remat"),
    ("--cpu-offloading-num-layers", (0,), "offload_names of parallel.remat"),
    ("--optimizer-offload-fraction", (1, 1.0), "all of the state is offloaded"),
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
