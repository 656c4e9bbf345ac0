"""How long a newcomer waits in a notebook: for the first number, the first picture, a trained model, a report.

    python benchmarks/first_hour.py [--repeats 3] [--json]        # with the extras benchmark, training and plot

Each run is a Jupyter kernel of its own, and each line is what one cell takes, imports and compiling included.  The
first run has an empty cache of programs; later runs load the programs that the first has kept, and their median is
"warm".  "of which steps" is a second training in the same kernel, in which nothing is compiled.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

CELLS = {
    "first number": """
import jaxacct as ja
run = ja.dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=1000)
ja.epsilon(run, delta=1e-5)
""",
    "noise for a target": """
ja.calibrate_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sampling_probability=0.01, steps=1000)
""",
    "first picture": "ja.profile(run).plot()",
    "risks of an attack": "ja.risk(run)",
    "trained model": """
import time
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
from jaxacct.training import Plan, Trainer
rng = np.random.default_rng(0)
images, labels = rng.normal(size=(2000, 64)).astype(np.float32), rng.integers(0, 10, 2000)
plan = Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=2000, expected_batch_size=100, epochs=5)
loss = lambda logits, label: optax.softmax_cross_entropy_with_integer_labels(logits, label)
module = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
trainer = Trainer(module, optax.adam(1e-3), plan, clip_norm=1.0, loss=loss)
state = trainer.fit(trainer.init(example=images[0]), (images, labels), ledger="run.jsonl")
state.epsilon
""",
    "report": """
from jaxacct.report import report
report("run.jsonl", out="report.html")
""",
}
STEPS = """
begin = time.perf_counter()
trainer.fit(trainer.init(example=images[0]), (images, labels), ledger="again.jsonl")
print(time.perf_counter() - begin)
"""
"""A second training in the same kernel: nothing is compiled."""


def cell(client, code):
    """(seconds, text that was printed) of a cell; RuntimeError where it raises."""
    printed = []
    begin = time.perf_counter()
    reply = client.execute_interactive(
        code, timeout=600, output_hook=lambda m: printed.append(m["content"].get("text", ""))
    )
    seconds = time.perf_counter() - begin
    if reply["content"]["status"] != "ok":
        raise RuntimeError("\n".join(reply["content"]["traceback"]))
    return seconds, "".join(printed)


def run(cache):
    """Seconds of every cell in a kernel of its own."""
    from jupyter_client.manager import start_new_kernel

    environment = os.environ | {"JAXACCT_CACHE_DIR": cache, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    with tempfile.TemporaryDirectory() as folder:
        manager, client = start_new_kernel(kernel_name="python3", env=environment, cwd=folder)
        try:
            found = {name: cell(client, code)[0] for name, code in CELLS.items()}
            found["of which steps"] = float(cell(client, STEPS)[1].split()[-1])
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o700)
        cold, *later = [run(cache) for _ in range(1 + options.repeats)]
    table = {name: (seconds, statistics.median(one[name] for one in later)) for name, seconds in cold.items()}
    if options.json:
        print(json.dumps(table))
        return
    print(f"{'':24}{'first':>10}{'warm':>10}  seconds")
    for name, (first, warm) in table.items():
        print(f"{name:24}{first:10.2f}{warm:10.2f}")


if __name__ == "__main__":
    main()
