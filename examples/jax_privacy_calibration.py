"""Calibrate jax_privacy's DP-SGD with jaxacct's certified accountant: pip install jax-privacy, then run this.

jax_privacy takes any dp_accounting PrivacyAccountant through a config with one method; the rest of its
calibration is unchanged. Prints the noise multiplier and the epsilon by jaxacct and by jax_privacy's own
PLD and RDP accountants.
"""

import jax_privacy

from jaxacct.interop import CertifiedAccountant

accounting = jax_privacy.accounting


class CertifiedConfig(accounting.DpAccountantConfig):
    """Tells jax_privacy to account with jaxacct."""

    def create_accountant(self):
        return CertifiedAccountant()


def main():
    run = {"num_updates": 1000, "num_samples": 60_000, "target_delta": 1e-5, "batch_sizes": 600}
    configs = {
        "jaxacct": CertifiedConfig(),
        "jax_privacy PLD": accounting.PldAccountantConfig(),
        "jax_privacy RDP": accounting.RdpAccountantConfig(),
    }
    for name, config in configs.items():
        accountant = accounting.DpsgdTrainingAccountant(dp_accountant_config=config)
        sigma = accounting.calibrate_noise_multiplier(
            target_epsilon=2.0, accountant=accountant, initial_min_noise=0.5, tol=1e-3, **run
        )
        params = accounting.DpParams(
            noise_multipliers=sigma, batch_size=run["batch_sizes"], num_samples=run["num_samples"], delta=1e-5
        )
        spent = accountant.compute_epsilon(run["num_updates"], params)
        print(f"{name:16} noise multiplier {sigma:.4f}  epsilon {spent:.5f}")


if __name__ == "__main__":
    main()
