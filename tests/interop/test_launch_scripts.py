"""Launch scripts of Megatron-LM: arguments are found without executing anything."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations import read_script

SCRIPT = """#!/bin/bash
# A comment with --not-an-argument and a 'quote
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=${SLURM_NNODES:-2}
WORLD=$(($GPUS*NODES))
DATA=$1
mkdir -p "$(dirname "$DATA")"
MODEL_ARGS=(
    --num-layers 32   # of the decoder
    --lr=1.0e-5
    "--split '99,1'"
    --name "two words"
)
MODEL_ARGS+=( --data-path $DATA )
OLD="
    --global_batch_size $WORLD \\
    --min-lr -1
"
if [[ -n "$DEBUG" ]]; then
    MODEL_ARGS+=(--log-interval 1 --num-layers 2)
    GPUS=1
fi
[ "$USE_FP8" = 1 ] && MODEL_ARGS+=(--fp8-format hybrid)
torchrun --nproc_per_node $GPUS --nnodes ${NODES} \\
    pretrain_gpt.py "${MODEL_ARGS[@]}" ${OLD} --bf16 2>&1 | tee log.txt
"""


def test_a_script_gives_its_arguments() -> None:
    found = read_script(SCRIPT, "run.sh", {})
    assert found.values == {
        "--num-layers": 32,
        "--lr": 1e-5,
        "--split": "'99,1'",
        "--name": "two words",
        "--data-path": "$1",
        "--global-batch-size": 16,
        "--min-lr": -1,
        "--bf16": True,
    }
    assert found.conditional == {"--log-interval": (1, 20), "--num-layers": (2, 20), "--fp8-format": ("hybrid", 23)}
    assert found.launcher == {"--nproc-per-node": "$GPUS", "--nnodes": 2}  # GPUS is 8 or 1


def test_conditions_are_taken_or_dropped() -> None:
    found = read_script(SCRIPT, "run.sh", {"GPUS": "4"})
    assert found.launcher["--nproc-per-node"] == 4 and found.values["--global-batch-size"] == 8
    assert found.decide("take").values["--num-layers"] == 2
    assert found.decide("drop").values["--num-layers"] == 32 and "--fp8-format" not in found.decide("drop").values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--a 1 --b\n--c x y", {"--a": 1, "--b": True, "--c": ["x", "y"]}),
        ("python train.py \\\n  --a 1", {"--a": 1}),
        ('CMD="python train.py --a 1 --b"\nsrun bash -c "$CMD"', {"--a": 1, "--b": True}),
        ('X="a b"\npython t.py --x "$X" --y $X', {"--x": "a b", "--y": ["a", "b"]}),
        ("X='$Y'\npython t.py --x $X --z $(date) --w ${V:-3}", {"--x": "$Y", "--z": "$(command)", "--w": 3}),
        ("A=2\nA=3\npython t.py --a $((A * 2 + 1)) --b $((Q+1))", {"--a": 7, "--b": "$Q"}),
        ("for i in 1 2; do A=$i; done\npython t.py --a $A", {"--a": "$A"}),
        ("if x; then python t.py --a 1; fi", {"--a": 1}),
        ("echo t.py\n[ -f t.py ] || exit 1\npython t.py --a 1", {"--a": 1}),
        ("A=(--a 1)\nB=(--b 2 ${A[@]})\npython t.py ${B[@]}", {"--b": 2, "--a": 1}),
        ("python t.py --a 1 --a 2", {"--a": 2}),
        ("python t.py --a 1 > log 2>&1 < in & tail -f --b", {"--a": 1}),
        ("python t.py --a 1\\", {"--a": 1}),
        ("python t.py --a 1 >", {"--a": 1}),
        (r"python t.py --a x\ y --b 1\;2", {"--a": "x y", "--b": "1;2"}),
        (r'python t.py --a "x\"y\"" --b 5$', {"--a": 'x"y"', "--b": "5$"}),
        ("{ python t.py --a 1; }", {"--a": 1}),
        ("A=(--a 1)\nB=()\npython t.py --b $A ${B}", {"--b": True, "--a": True}),
        ("python t.py --a ${X#y} --b ${Z[@]}", {"--a": "$(X#y)", "--b": "$Z"}),
        ("python t.py --a $((1 << 2)) --b $((2 ** 99))", {"--a": "$(arithmetic)", "--b": "$(arithmetic)"}),
    ],
)
def test_shell_text(text: str, values: dict[str, Any]) -> None:
    assert read_script(text, "run.sh", {}).values == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("python t.py --a 'b", "'"),
        ('\npython t.py --a "b', "line 2"),
        ("A=${B", "1: a bracket"),
        ("echo 1", "--num-layers"),
        ("python a.py --a 1\npython b.py --b 1", "Python"),
        ("A=xxxxxxxxxxxxxxxx\n" + 'A="$A$A"\n' * 20, "262,144"),
        ("A=(a b)\n" + "A=(${A[@]} ${A[@]})\n" * 16, "20,000"),
    ],
)
def test_wrong_scripts(text: str, problem: str) -> None:
    with raises(ConfigError, problem):
        read_script(text, "run.sh", {})


def test_nothing_is_executed(tmp_path: Any) -> None:
    file = tmp_path / "made"
    text = f"touch {file}\nX=$(touch {file})\nY=`touch {file}`\npython t.py --a $X --b ${{Z:-$(touch {file})}} --c $Y"
    found = read_script(text, "run.sh", {})
    assert not file.exists()
    assert found.values == {"--a": "$(command)", "--b": "$(command)", "--c": "$(command)"}
