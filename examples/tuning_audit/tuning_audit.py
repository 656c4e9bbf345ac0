"""Audit of private tuning under the threat models of Xiang, Wang, Wang 2024, on digits: Figures 1 to 6, Table 3.

    python examples/tuning_audit/tuning_audit.py [--quick] [--out FOLDER]

Needs the extras `training` and `examples`.  The library's step trains a logistic regression on scikit-learn's digits.
The number K of candidates is geometric of mean 10; candidates differ in their learning rates.  The candidate with the
best score is released with all its noisy gradients.  NTNV: ordinary data, ordinary validation.  NTCV: the score is the
adversary's.  ETCV: as NTCV, with no data but the canary.  Prints the report; --out writes tuning_audit.csv and .png.
"""

import argparse
import csv
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacct as ja
from jaxacct import audit, selection
from jaxacct.training import Plan, Trainer

DELTA, STEPS, MEAN = 1e-5, 4, 10.0
LAW = selection.Geometric(1.0 / MEAN)
RATES = (0.005, 0.04)
"""Learning rates are log-uniform between these, for sums of gradients."""
SIZE = 100
"""Training examples; as many for validation."""
SIMULTANEOUS = 0.95
"""Confidence with which all lower bounds of a run of this script hold together."""
HELD_OUT = 0.2
"""Share of the games that chooses the threshold."""
CLAIMS = {"Rényi (Papernot, Steinke)": "renyi", "profile (Koskela et al.)": "privacy_profile"}
ONE_RUN, OURS, ALGORITHM_3 = "one run", "worst case (ours)", "Algorithm 3"


def load():
    """(images, labels) for training and for validation: 8 x 8 pixels averaged to 4 x 4, of length at most 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[: 2 * SIZE]
    small = images[order].reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16) / 16.0
    data = small.astype(np.float32), labels[order].astype(np.int32)
    return tuple(a[:SIZE] for a in data), tuple(a[SIZE:] for a in data)


def loss(params, example):
    image, label = example
    weights, bias = params
    return optax.softmax_cross_entropy_with_integer_labels(image @ weights + bias, label)


def foreign():
    """A canary from elsewhere: a chequerboard, which no digit looks like."""
    return (np.indices((4, 4)).sum(axis=0) % 2).reshape(16).astype(np.float32), np.int32(0)


PARAMS = jnp.zeros((16, 10)), jnp.zeros(10)
"""The first coordinate is the weight of the upper left corner for the digit 0."""


def game_of(base, canary, train):
    """(plan, game) for a base epsilon; the canary joins the data `train`, or is the only example without data."""
    size = 1 + (len(train[1]) if train else 0)
    plan = Plan(target_epsilon=base, target_delta=DELTA, dataset_size=size, sampling_probability=1.0, steps=STEPS)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    trainer = Trainer(loss, optimizer, plan, clip_norm=1.0)
    if canary == "gradient":
        return plan, audit.gradient_canaries(trainer, train)
    empty = tuple(np.empty((0, *np.shape(a)), np.asarray(a).dtype) for a in foreign())
    return plan, audit.input_canary(trainer, train or empty, foreign())


def candidates(game, present, total, seed, validation, progress):
    """Proxy of the adversary and scores of `total` independent candidates, learning rates drawn for each."""
    rng = np.random.default_rng([seed, int(present)])
    rates = game.trainer.plan.expected_batch_size * np.exp(rng.uniform(*np.log(RATES), total)).astype(np.float32)

    def outcome(params):
        each = jax.vmap(lambda *example: loss(params, example))
        return jnp.stack([jnp.mean(each(*validation)), loss(params, foreign()), params[0][0, 0]])

    played = game.play(
        PARAMS,
        present,
        total,
        seed=seed,
        hyperparameters={"learning_rate": rates},
        outcome=outcome,
        progress=progress,
    )
    validated, own, coordinate = played.outcome.T
    return {
        "proxy": played.scores[:, 0],
        "validation": -validated,  # the usual score
        "own loss": -own,  # an adversary's score: how well the canary is learnt
        "coordinate": -coordinate / rates,  # another: how far the first parameter went down
    }


def best_of(groups, drawn, score):
    """(proxy, score) of the best-scoring candidate of each group; `groups` has the sizes of consecutive groups."""
    starts = np.concatenate([[0], np.cumsum(groups)[:-1]])
    order = np.lexsort((-drawn[score], np.repeat(np.arange(groups.size), groups)))
    winner = order[starts]
    return drawn["proxy"][winner], drawn[score][winner]


def lower_bounds(worlds, groups, score, confidence):
    """Lower bounds by the proxy, and by the proxy and the score together."""
    (absent, absent_score), (present, present_score) = (
        best_of(groups[i], world, score) for i, world in enumerate(worlds)
    )
    # abnormal data spoils the ordinary score, and raises the adversary's own
    sign = -1.0 if score == "validation" else 1.0
    half = int(HELD_OUT * groups[0].size)  # the scale uses only the games held out for the threshold
    scale = lambda values: sign * (values - np.mean(absent_score[:half])) / np.std(absent_score[:half])
    unit = np.std(absent[:half])
    proxies = {
        "proxy": (absent, present),
        "proxy and score": (absent / unit + 0.3 * scale(absent_score), present / unit + 0.3 * scale(present_score)),
    }
    for name, (one, other) in proxies.items():
        for method in ("gaussian_fit", "clopper_pearson"):
            yield (
                name,
                audit.from_scores(one, other, delta=DELTA, confidence=confidence, method=method, held_out=HELD_OUT),
            )


def claims_of(plan):
    """What is claimed: for one run alone, then for the tuning by published bounds, by ours, and by Algorithm 3."""
    base = plan.mechanism
    yield audit.Claim(ONE_RUN, plan.epsilon, DELTA)
    for name, bound in CLAIMS.items():
        yield audit.Claim(name, selection.bound_epsilon(base, LAW, DELTA, bound=bound), DELTA)
    yield audit.Claim(OURS, ja.epsilon(selection.select(base, LAW), DELTA), DELTA)
    mu = np.sqrt(STEPS) / plan.noise_multiplier
    yield audit.Claim(
        ALGORITHM_3, selection.bound_epsilon(ja.Gaussian(1.0 / mu), LAW, DELTA, bound="monotone_score"), DELTA
    )


MODELS = (
    ("NTNV", "input", True, "validation"),
    ("NTNV", "gradient", True, "validation"),
    ("NTCV", "input", True, "own loss"),
    ("NTCV", "gradient", True, "coordinate"),
    ("ETCV", "input", False, "own loss"),
    ("ETCV", "gradient", False, "coordinate"),
)


def reduced_game(plan, claims, runs, confidence):
    """Rows for Figure 6: audits of `runs` games of two Gaussians, with the score x and with the worst score."""
    from scipy.special import ndtr, ndtri

    mu = np.sqrt(STEPS) / plan.noise_multiplier
    found = selection.attack(plan.mechanism, LAW, delta=DELTA)
    ends = np.concatenate([[0.0], np.geomspace(1e-12, 1.0, 400)])
    ranks = np.stack([ends[:-1], ends[1:]], axis=1)[::-1]
    curve = lambda u: ndtr(ndtri(u) + mu)
    monotone = audit.Cells(-np.diff(curve(ends[::-1])), -np.diff(ends[::-1]), ranks)
    for name, cells in (("score x", monotone), ("worst score", audit.attack_cells(found, curve))):
        bound = audit.cell_audit(cells, LAW, delta=DELTA, runs=runs, confidence=confidence)
        yield audit.Row(f"reduced game, {name}", bound, claims)


def run(bases, games, reduced, progress=None):
    """{base epsilon: rows of its report}."""
    train, validation = load()
    count = len(bases) * (len(MODELS) * 4 + 2)
    confidence = 1.0 - (1.0 - SIMULTANEOUS) / count
    rows = {}
    for base in bases:
        known = {}
        for place, (model, canary, with_data, score) in enumerate(MODELS):
            if (canary, with_data) not in known:
                plan, game = game_of(base, canary, train if with_data else None)
                number = games if with_data or canary == "input" else 4 * games  # a gradient canary alone is quick
                rng = np.random.default_rng([int(100 * base), place])
                groups = [games_drawn(number, rng) for _ in range(2)]
                worlds = [
                    candidates(game, bool(i), int(group.sum()), 1000 * place + int(10 * base), validation, progress)
                    for i, group in enumerate(groups)
                ]
                known[canary, with_data] = worlds, groups
            if not place:
                claims = tuple(claims_of(plan))
                rows[base] = []
            for proxy, found in lower_bounds(*known[canary, with_data], score, confidence):
                rows[base].append(audit.Row(f"{model}, {canary}, {proxy}", found, claims))
        rows[base] += reduced_game(plan, claims, reduced, confidence)
    return rows


def games_drawn(number, rng):
    """The number K of candidates in each of `number` games."""
    table = LAW.probability(np.arange(400.0))
    return rng.choice(400, number, p=table / table.sum())


def table3(rows):
    """Lower bounds by Gaussian fits, as in Table 3: a line for every base epsilon, a column for every audit."""
    names = [row.name for row in next(iter(rows.values())) if row.found.method == "gaussian_fit"]
    yield ["base epsilon", *names]
    for base, each in rows.items():
        yield [base, *(f"{row.found.epsilon:.3f}" for row in each if row.found.method == "gaussian_fit")]


def draw(rows, path):
    """One panel per model and canary, and one for the reduced game: claims as lines, lower bounds as points."""
    from matplotlib.figure import Figure

    from jaxacct.plots import style

    panels = [f"{model}, {canary}" for model, canary, *_ in MODELS] + ["reduced game"]
    bases = list(rows)
    with style.settings():
        figure = Figure(figsize=(13.0, 6.4), layout="constrained")
        every = figure.subplots(2, 4)
        places = [every[j % 2, j // 2] for j in range(6)] + [every[0, 3]]
        for axes, panel in zip(places, panels, strict=True):
            here = {base: [row for row in rows[base] if row.name.startswith(panel)] for base in bases}
            first = here[bases[0]]
            for number, claim in enumerate(first[0].claims):
                values = [here[base][0].claims[number].epsilon for base in bases]
                dash = ":" if claim.name in (ONE_RUN, ALGORITHM_3) else "-"
                axes.plot(bases, values, dash, marker="_", color=f"C{number}", label=f"claim: {claim.name}")
            for number, row in enumerate(first):
                mark = "o^sD"[number]
                values = [here[base][number].found.epsilon for base in bases]
                label = f"audit: {row.name.removeprefix(panel + ', ')}, {row.found.method.replace('_', ' ')}"
                axes.plot(bases, values, mark, color="0.15", mfc="none" if number % 2 else "0.15", label=label)
            axes.set(title=panel, xlabel="base $\\varepsilon$", ylabel="$\\varepsilon$", ylim=(0, None))
        every[1, 3].axis("off")
        handles, labels = places[0].get_legend_handles_labels()
        more = places[-1].get_legend_handles_labels()
        both = dict(zip(labels + more[1], handles + more[0], strict=True))
        every[1, 3].legend(both.values(), both.keys(), loc="center", fontsize=8)
        style.save(figure, pathlib.Path(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one base epsilon and few games")
    parser.add_argument("--out", help="folder for tuning_audit.csv and .png", default=None)
    arguments = parser.parse_args()
    begin, cpu = time.perf_counter(), time.process_time()
    settings = ((2.0,), 100, 1_000_000) if arguments.quick else ((1.0, 2.0, 4.0), 1500, 100_000_000)
    rows = run(*settings)
    report = audit.Report([row for each in rows.values() for row in each])
    print(report)
    for line in table3(rows):
        print(*line, sep=" | ")
    print(f"{time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of processor time")
    if arguments.out:
        folder = pathlib.Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "tuning_audit.csv").open("w", newline="") as file:
            records = [{"base": base} | r for base, each in rows.items() for r in audit.Report(each).records()]
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
        draw(rows, folder / "tuning_audit.png")


if __name__ == "__main__":
    main()
