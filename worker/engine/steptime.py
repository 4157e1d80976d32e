"""A model of how long a step takes, fitted while serving: seconds = a + b * tokens + c * keys read.

Recursive least squares on the 3 x 3 information matrix, a few microseconds a step. Forgetting is
directional (Cao and Schwartz, 2000): a step takes away old information only in the direction in which it
brings new, so that an hour of small steps, all alike, does not unlearn what large ones cost. Outliers
count less (Huber weights on a running scale of the residuals).
"""

from __future__ import annotations

from worker.engine.budget import StepLoad

FORGETTING = 0.98  # weight of a step after 50 more of its kind: 0.36
PRIOR = 1e-3  # information at the start, in weights of one step: all coefficients are 0
HUBER = 3.0  # residuals beyond this many scales count less
SETTLING = 8  # steps until residuals are judged
TOKENS, KEYS = 1 / 128, 1 / 32768  # features are scaled to the order of one

Vector = list[float]


class StepTimeModel:
    """`base_s`, `token_s` and `key_s` are the a, b and c of the module's head; never negative."""

    def __init__(self) -> None:
        self.num_observed = 0
        self.scale_s = 0.0  # running mean of absolute residuals, capped against outliers
        self._free: Vector = [0.0, 0.0, 0.0]  # the solution, coefficients of either sign
        self._theta: Vector = [0.0, 0.0, 0.0]  # without negative ones
        self._information = [[PRIOR * (i == j) for j in range(3)] for i in range(3)]

    @property
    def base_s(self) -> float:
        return self._theta[0]

    @property
    def token_s(self) -> float:
        return self._theta[1] * TOKENS

    @property
    def key_s(self) -> float:
        return self._theta[2] * KEYS

    def predict(self, load: StepLoad) -> float:
        """Expected seconds of a step with this load."""
        return self.base_s + self.token_s * load.num_tokens + self.key_s * load.kv_read

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """Learn from one step."""
        x = [1.0, load.num_tokens * TOKENS, load.kv_read * KEYS]
        weight = self._weight(abs(duration_s - self.predict(load)))
        self._forget(x)
        moment = _times(self._information, self._free)
        for i in range(3):
            moment[i] += weight * x[i] * duration_s
            for j in range(3):
                self._information[i][j] += weight * x[i] * x[j]
        self.num_observed += 1
        self._free = self._solve_for([0, 1, 2], moment)
        self._theta = self._solve(moment)

    def _weight(self, residual_s: float) -> float:
        if self.num_observed < SETTLING:
            self.scale_s = max(self.scale_s, residual_s / SETTLING)
            return 1.0
        limit = HUBER * self.scale_s
        self.scale_s += 0.05 * (min(residual_s, 2 * limit) - self.scale_s)
        return 1.0 if residual_s <= limit else limit / residual_s

    def _forget(self, x: Vector) -> None:
        seen = _times(self._information, x)
        factor = (1 - FORGETTING) / sum(a * b for a, b in zip(x, seen, strict=True))
        for i in range(3):
            for j in range(3):
                self._information[i][j] -= factor * seen[i] * seen[j]

    def _solve(self, moment: Vector) -> Vector:
        """Least squares without negative coefficients: one that comes out negative is left out."""
        kept, theta = [0, 1, 2], self._free
        while min(theta) < 0:
            kept.remove(min(kept, key=theta.__getitem__))
            theta = self._solve_for(kept, moment)
        return theta

    def _solve_for(self, kept: list[int], moment: Vector) -> Vector:
        """Gaussian elimination on the kept rows; the matrix is positive definite, so no pivoting."""
        rows = [[self._information[i][j] for j in kept] + [moment[i]] for i in kept]
        size = len(kept)
        for k in range(size):
            for i in range(k + 1, size):
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
        theta = [0.0, 0.0, 0.0]
        for k in range(size - 1, -1, -1):
            known = sum(rows[k][j] * theta[kept[j]] for j in range(k + 1, size))
            theta[kept[k]] = (rows[k][size] - known) / rows[k][k]
        return theta


def _times(matrix: list[Vector], vector: Vector) -> Vector:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]
