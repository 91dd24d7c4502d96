"""Memory of a whole process that trains a Keras model, plain and with blocks run again.

`python -m benchmarks._gradient_checkpointing_keras` prints a table. Each row is a fresh process,
whose highest resident memory is read when it ends, less what it had before the fit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

BLOCKS, WIDTH, ROWS = 12, 256, 4096
METHODS = ("plain", "ours 0.5", "ours 0.3", "RematScope")
COMPILED = {"torch": (False,), "tensorflow": (False, True), "jax": (True,)}


def train(method: str, compiled: bool, steps: int = 4) -> dict[str, Any]:
    """Train in this process.

    Args:
        method: One of `METHODS`.
        compiled: With XLA.
        steps: To make. Default: 4.
    """
    import keras
    import numpy as np

    from keras_ext import DynamicGradientCheckpointing

    keras.utils.set_random_seed(0)
    with keras.RematScope("full") if method == "RematScope" else nullcontext():
        model = keras.Sequential([keras.Input((WIDTH,)), *map(_block, range(BLOCKS))])
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=compiled)
    x = np.random.default_rng(0).normal(size=(ROWS * steps, WIDTH)).astype("float32")
    callbacks = []
    if method.startswith("ours"):
        callbacks.append(DynamicGradientCheckpointing(float(method.split()[1])))
    model.fit(x[:8], x[:8], verbose=0)  # much is loaded on first use
    before = _memory("VmRSS")
    began = time.perf_counter()
    history = model.fit(x, x, ROWS, shuffle=False, verbose=0, callbacks=callbacks)
    found = {"peak": _memory("VmHWM") - before, "loss": history.history["loss"][0]}
    found["seconds"] = time.perf_counter() - began
    if callbacks:
        plan = callbacks[0].plan_
        found |= {"predicted": plan.peak, "plain": plan.plain_peak, "blocks": len(plan.spans)}
    return found


def _block(i: int) -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            layers.Dense(2 * WIDTH, "gelu"),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(WIDTH, "tanh"),
        ],
        name=f"block_{i}",
    )


def _memory(field: str) -> int:
    # Not getrusage: its highest memory is that of the process which started this one, if greater.
    found = re.search(
        rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    if found is None:
        raise OSError(f"/proc/self/status has no {field}: this runs on Linux only")
    return int(found[1]) * 1024


def measured(backend: str, method: str, compiled: bool, steps: int = 4) -> dict[str, Any]:
    """Train in a fresh process; `error` says why that failed.

    Args:
        backend: Of Keras.
        method: One of `METHODS`.
        compiled: With XLA.
        steps: To make. Default: 4.
    """
    command = [sys.executable, "-m", __spec__.name, "--child", method, "--compiled", str(compiled)]
    command += ["--steps", str(steps)]
    done = subprocess.run(
        command,
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        said = re.findall(r"^\w+(?:Error|Exception): .*", done.stderr, re.MULTILINE)
        return {"error": said[-1][:100] if said else "no message"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=METHODS)
    parser.add_argument("--compiled", default="False")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", nargs="+", default=list(COMPILED), choices=list(COMPILED))
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train(arguments.child, arguments.compiled == "True", arguments.steps)))
        return
    print("| backend | method | memory, MiB | of plain | predicted | seconds | loss |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for backend in arguments.backend:
        for compiled in COMPILED[backend]:
            plain = None
            for method in METHODS:
                row = measured(backend, method, compiled)
                name = f"{backend}, XLA" if compiled else backend
                if "error" in row:
                    print(f"| {name} | {method} | fails: {row['error']} | | | | |", flush=True)
                    continue
                plain = plain or row["peak"]
                share = f"{row['predicted'] / row['plain']:.0%}" if "predicted" in row else ""
                print(
                    f"| {name} | {method} | {row['peak'] / 2**20:.0f} | {row['peak'] / plain:.0%} "
                    f"| {share} | {row['seconds']:.1f} | {row['loss']:.6f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
