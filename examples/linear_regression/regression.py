"""Private linear regression: the data, and what is released of it.  Sensitivities are proved in README.md.

Records are (x, y) with |x| <= 1 and |y| <= 1.  Of two neighbouring data sets, one has a zero record where the other has
any record, so that the number of records n is public.  H = X'X + lam I, theta = H^-1 X'y, all in float64.
"""

import numpy as np
from scipy.special import ndtr, ndtri

CENTRES = np.array([50.0, 1.5, 26.0, 95.0, 190.0, 115.0, 50.0, 4.0, 4.6, 91.0])
SPREADS = np.array([13.0, 0.5, 4.5, 14.0, 35.0, 30.0, 13.0, 1.3, 0.5, 11.0])
RADIUS = 4.0
TARGET_CENTRE, TARGET_SPREAD = 150.0, 200.0
"""Public round numbers for age, sex, body mass index, blood pressure, six serum values; target: disease progression."""
TEST_SHARE = 5
SEARCHED, TRIED, ROUNDS = (1e-6, 1e6), 12, 5
"""Precisions of a posterior sample: the range that is searched, how many are tried in a round, and how many rounds."""


def normalised(features, target):
    """(X, y) with |x| <= 1 and |y| <= 1, record by record: shifted, scaled and cut by public numbers alone."""
    x = (features - CENTRES) / SPREADS / RADIUS
    x = np.column_stack([x, np.full(len(x), 1.0 / RADIUS)])
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0) * (1.0 + 1e-15)
    return x, np.clip((target - TARGET_CENTRE) / TARGET_SPREAD, -1.0, 1.0)


def split(rng, x, y, copies=1):
    """((X, y) for training, (X, y) for testing): a fifth of the records, in random order; the others are repeated."""
    order = rng.permutation(len(y))
    test, train = order[::TEST_SHARE], np.delete(order, np.s_[::TEST_SHARE])
    return (np.repeat(x[train], copies, axis=0), np.repeat(y[train], copies)), (x[test], y[test])


def ridge(x, y, lam):
    """(H, theta)."""
    h = x.T @ x + lam * np.eye(x.shape[1])
    return h, np.linalg.solve(h, x.T @ y)


def residual_bound(size, lam, least=0.0):
    """Largest |y - x'theta| of any record, for any data with that least eigenvalue: 1 + max s/(s^2 + lam) sqrt(n)."""
    s = np.maximum(np.sqrt(least), np.sqrt(lam))
    return 1.0 + s / (s**2 + lam) * np.sqrt(size)


def posterior_pair(precision, share, residual):
    """(M, v): N(0, 1) and N(M, v) dominate one posterior sample, in both directions and for both roles of the data.

    precision : gamma; the sample is N(theta, (gamma H)^-1).  share : at least 1/(lam + least eigenvalue), below 1.
    residual : at least 1 + |theta|.
    """
    return np.sqrt(precision * share / (1.0 - share)) * residual, 1.0 - share


def posterior_delta(epsilon, mean, variance):
    """The larger of H_{e^eps}(P||Q) and H_{e^eps}(Q||P) for P = N(0, 1), Q = N(mean, variance < 1), eps >= 0.

    log P/Q is the convex parabola a z^2 - b z + c: above eps outside of its roots, below -eps between them.
    """
    epsilon, mean, variance = np.broadcast_arrays(np.asarray(epsilon, float), mean, variance)
    a, b = (1.0 / variance - 1.0) / 2.0, mean / variance
    c = mean**2 / (2.0 * variance) + 0.5 * np.log(variance)

    def roots(level):
        disc = b**2 - 4.0 * a * (c - level)
        far = 0.5 * (b + np.sqrt(np.maximum(disc, 0.0)))
        return disc, (c - level) / far, far / a

    def masses(low, high):
        p = ndtr(low), ndtr(-high)
        q = ndtr((low - mean) / np.sqrt(variance)), ndtr((mean - high) / np.sqrt(variance))
        return p, q

    grown = np.exp(epsilon)
    _, low, high = roots(epsilon)  # eps >= 0: the discriminant is M^2/v + (1/v - 1)(2 eps - log v) > 0
    p, q = masses(low, high)
    removed = sum(p) - grown * sum(q)
    disc, low, high = roots(-epsilon)
    p, q = masses(low, high)
    added = np.where(disc > 0.0, (1.0 - sum(q)) - grown * (1.0 - sum(p)), 0.0)
    return np.maximum(np.maximum(removed, added), 0.0) + 1e-15 * (1.0 + grown)


def posterior_precision(share, residual, epsilon, delta):
    """The largest precision, to 1 part in 1000, for which a posterior sample meets all points (epsilon, delta); or 0.

    The profile rises with the mean, and the mean with the precision; what is returned has itself been evaluated.
    """
    if share >= 1.0:
        return 0.0
    low, high = np.log(SEARCHED)
    for _ in range(ROUNDS):
        grid = np.linspace(low, high, TRIED)
        mean, variance = posterior_pair(np.exp(grid)[:, None], share, residual)
        holds = np.all(posterior_delta(epsilon, mean, variance) <= delta, axis=1)
        if not holds[0]:
            return 0.0
        last = int(np.flatnonzero(holds)[-1])
        low, high = grid[last], grid[min(last + 1, TRIED - 1)]
    return float(np.exp(low))


def sample_posterior(rng, h, theta, precision):
    """One draw from N(theta, (precision H)^-1)."""
    upper = np.linalg.cholesky(h).T
    return theta + np.linalg.solve(upper, rng.normal(size=len(theta))) / np.sqrt(precision)


def released_bounds(rng, x, y, lam, eigenvalue_noise, norm_mu, failure):
    """(lower bound of the least eigenvalue of X'X, upper bound of 1 + |theta|), each wrong with probability failure/2.

    The eigenvalue moves by at most 1, and log(1 + |theta|) by at most -log(1 - share), share = 1/(lam + eigenvalue).
    """
    size, back = len(y), -ndtri(0.5 * failure)
    gram = x.T @ x
    least = np.linalg.eigvalsh(gram)[0] + eigenvalue_noise * (rng.normal() - back)
    least = max(float(least), 0.0)
    limit = residual_bound(size, lam, least)
    share = 1.0 / (lam + least)
    if share >= 1.0:
        return least, limit
    theta = np.linalg.solve(gram + lam * np.eye(len(gram)), x.T @ y)
    noise = -np.log1p(-share) / norm_mu
    return least, min(float((1.0 + np.linalg.norm(theta)) * np.exp(noise * (rng.normal() + back))), limit)


def clipped_error(x, y, theta):
    """Sum of squared errors, each at most 1: a record moves it by at most 1, and a zero record adds nothing."""
    return float(np.sum(np.minimum((y - x @ theta) ** 2, 1.0)))


def output_perturbation(rng, x, y, lam, noise_multiplier, radius):
    """Ridge regression within |theta| <= radius, plus Gaussian noise for its sensitivity (1 + radius)/lam.

    [Chaudhuri, Monteleoni, Sarwate 2011], with Gaussian noise and a constraint, without which the squared error has no
    Lipschitz constant.
    """
    theta = constrained_ridge(x, y, lam, radius)
    return theta + noise_multiplier * (1.0 + radius) / lam * rng.normal(size=len(theta))


def constrained_ridge(x, y, lam, radius):
    """argmin |y - X theta|^2 + lam |theta|^2 over |theta| <= radius: lam is raised until the constraint holds."""
    values, vectors = np.linalg.eigh(x.T @ x)
    along = vectors.T @ (x.T @ y)
    norm = lambda extra: np.linalg.norm(along / (values + lam + extra))
    if norm(0.0) <= radius:
        return vectors @ (along / (values + lam))
    low, high = 0.0, np.linalg.norm(along) / radius
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if norm(middle) > radius else (low, middle)
    return vectors @ (along / (values + lam + high))
