"""Names that users may know from other libraries.  For each name, an error message suggests the name in `jaxacct`."""

from __future__ import annotations

from collections.abc import Iterable

MEANINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sigma", "noise", "std", "stddev", "noise_scale"), ("noise_multiplier", "scale")),
    **dict.fromkeys(
        ("q", "p", "rate", "sample_rate", "sampling_rate", "sampling_prob", "sampling_ratio"), ("sampling_probability",)
    ),
    **dict.fromkeys(("sampling_rates", "rates", "sample_rates"), ("sampling_rates", "sampling_probability")),
    **dict.fromkeys(("t", "num_steps", "n_steps", "iterations", "num_iterations", "compositions"), ("steps",)),
    **dict.fromkeys(("epoch", "num_epochs", "n_epochs"), ("epochs", "steps")),
    **dict.fromkeys(
        ("n", "num_examples", "num_samples", "sample_size", "data_size", "number_of_examples"), ("dataset_size",)
    ),
    **dict.fromkeys(("batch", "lot_size"), ("batch_size", "expected_batch_size")),
    "batch_size": ("expected_batch_size", "sampling_probability"),
    **dict.fromkeys(("eps", "epsilon", "target_eps"), ("epsilon", "target_epsilon")),
    "target_epsilon": ("epsilon",),
    "delta": ("target_delta",),
    "target_delta": ("delta",),
    "sensitivity": ("noise_multiplier", "scale"),
    **dict.fromkeys(("strategy", "bands", "noising_matrix"), ("noise",)),
    **dict.fromkeys(("adjacency", "adjacency_type", "relation_type", "neighboring_relation"), ("relation",)),
    **dict.fromkeys(("neighbouring_relation", "neighboring", "neighbouring", "neighborhood"), ("relation",)),
    **dict.fromkeys(("sampler", "sampling_method", "sampling_scheme", "sampling_type", "batch_rule"), ("sampling",)),
    **dict.fromkeys(("batch_sampling", "poisson_sampling", "subsampling"), ("sampling",)),
    **dict.fromkeys(("group_size", "max_examples_per_user"), ("group",)),
    "truncated_batch_size": ("cap",),
    "cycle_length": ("groups",),
    "privacy_unit": ("unit",),
    "law": ("repetitions", "k"),
}
"""Names of arguments and columns in other libraries, each with the names in `jaxacct`, the likeliest first."""
OF_OTHERS = {
    **dict.fromkeys(
        ("expected_batch_size", "noise_schedule", "batch_schedule", "data_dependent", "unit", "noise", "early_stop"),
        "jaxacct.training.Plan",
    ),
    "sampling_rates": "jaxacct.training.Plan",
    "participations": "ja.RandomAllocation",
    "fpr": "ja.risk",
}
"""Words that a sweep refuses, each with the name to ask instead. `sweeps` may not import these to read the words."""
FRONT_DOOR = {
    **dict.fromkeys(("get_epsilon", "compute_epsilon", "eps", "compute_eps", "compute_dp_sgd_privacy"), "ja.epsilon"),
    **dict.fromkeys(("get_delta", "compute_delta"), "ja.delta"),
    **dict.fromkeys(
        ("noise_multiplier", "sigma", "get_noise_multiplier", "find_noise_multiplier", "compute_noise"),
        "ja.calibrate_noise_multiplier",
    ),
    **dict.fromkeys(("dpsgd", "DPSGD", "DpSgd", "DPSGDMechanism", "dp_sgd_mechanism"), "ja.dp_sgd"),
    **dict.fromkeys(("GaussianMechanism", "gaussian"), "ja.Gaussian"),
    **dict.fromkeys(("LaplaceMechanism", "laplace"), "ja.Laplace"),
    **dict.fromkeys(("self_compose", "Repeated"), "ja.repeat"),
    **dict.fromkeys(("Composed", "composition"), "ja.compose"),
    **dict.fromkeys(("RDPAccountant", "compute_rdp"), "ja.rdp_epsilon"),
    **dict.fromkeys(("PLDAccountant", "PRVAccountant", "Accountant", "accountant"), "ja.epsilon"),
    **dict.fromkeys(("plot", "plot_profile"), "ja.plot_profiles"),
    "plot_tradeoff": "ja.plot_tradeoffs",
    **{name: f"jaxacct.training.{name}" for name in ("Plan", "Trainer", "Ledger")},
    **dict.fromkeys(("PrivacyEngine", "make_private"), "jaxacct.training.Trainer"),
    "select": "jaxacct.selection.select",
    "tune": "jaxacct.tuning.tune",
    "advise": "jaxacct.tuning.advise",
}
"""Names of functions and classes in other libraries, each with its counterpart in `jaxacct`."""


def meant(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that `word` stands for in other libraries, else the known name spelt most like it, else "".

    >>> meant("sigma", ["noise_multiplier", "steps"]), meant("setps", ["noise_multiplier", "steps"]), meant("x", ["y"])
    ('noise_multiplier', 'steps', '')
    """
    names = list(known)
    for name in MEANINGS.get(word.lower(), ()):
        if name in names:
            return name
    return nearest(word, names, cutoff)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is spelt most like `word`, or "" if none is near."""
    import difflib  # slow to import, and needed only for an error message

    spelt = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower().replace(" ", "_"), spelt, n=1, cutoff=cutoff)
    return spelt[near[0]] if near else ""
