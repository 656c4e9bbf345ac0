"""Opacus's training steps, timed one by one on demand: `benchmarks/training.py --opacus PYTHON` runs this file.

Reads one kind of step (of MODES) a line, takes a step of that kind and prints its seconds.  The networks, the batch and
the noise are those of `training.py`; weights and images are random.
"""

import argparse
import sys
import time

import opacus
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODES = ("not private", "hooks", "ghost")
"""Kinds of steps that are timed: plain, and Opacus with two ways to per-example norms."""


def convnet():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def dense():
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 256), nn.ReLU()), *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    )


def step_of(mode, network, data, noise, clip_norm):
    """A function that takes one step on all the data."""
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=len(data))
    if mode != "not private":
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=clip_norm,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
        model, optimizer, *between, loader = made
        criterion = between[0] if between else criterion
    images, labels = data.tensors

    def step():
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=["convnet", "dense"])
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--noise", type=float, required=True)
    parser.add_argument("--clip-norm", type=float, required=True)
    args = parser.parse_args()
    network = {"convnet": convnet, "dense": dense}[args.network]
    data = TensorDataset(torch.randn(args.batch, 1, 28, 28), torch.randint(0, 10, (args.batch,)))
    steps = {mode: step_of(mode, network, data, args.noise, args.clip_norm) for mode in MODES}
    count = sum(p.numel() for p in network().parameters())
    print(count, opacus.__version__, torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        steps[line.strip()]()
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
