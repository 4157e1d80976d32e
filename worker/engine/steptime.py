"""A model of how long a step takes, fitted while serving: seconds = a + b * tokens + c * keys read.

Recursive least squares with exponential forgetting, in information form (the 3 x 3 normal equations), so that
it costs a few microseconds a step. Outliers count less (Huber weights on a running scale of the residuals).
What the recent steps do not tell apart stays as it was: the solution is drawn towards the previous one.
"""

from __future__ import annotations

from worker.engine.budget import StepLoad

FORGETTING = 0.98  # weight of a step after 50 more steps: 0.36
HOLD = 1e-3  # pull towards the previous solution, in weights of one step
HUBER = 3.0  # residuals beyond this many scales count less
TOKENS, KEYS = 1 / 128, 1 / 32768  # features are scaled to the order of one

Vector = tuple[float, float, float]


class StepTimeModel:
    """`base_s`, `token_s` and `key_s` are the a, b and c of the module's head; never negative."""

    def __init__(self) -> None:
        self.num_observed = 0
        self.scale_s = 0.0  # running mean of absolute residuals, capped against outliers
        self._theta: Vector = (0.0, 0.0, 0.0)
        self._information = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3

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
        weight = self._weight(abs(duration_s - self.predict(load)))
        x = (1.0, load.num_tokens * TOKENS, load.kv_read * KEYS)
        for i in range(3):
            self._moment[i] = FORGETTING * self._moment[i] + weight * x[i] * duration_s
            for j in range(3):
                self._information[i][j] = FORGETTING * self._information[i][j] + weight * x[i] * x[j]
        self.num_observed += 1
        self._theta = self._solve()

    def _weight(self, residual_s: float) -> float:
        if self.num_observed < 8:
            self.scale_s = max(self.scale_s, residual_s / 8)
            return 1.0
        limit = HUBER * self.scale_s
        self.scale_s += 0.05 * (min(residual_s, 2 * limit) - self.scale_s)
        return 1.0 if residual_s <= limit else limit / residual_s

    def _solve(self) -> Vector:
        """Least squares without negative coefficients: one that comes out negative is left out."""
        kept = [0, 1, 2]
        while kept:
            theta = self._solve_for(kept)
            worst = min(kept, key=lambda i: theta[i])
            if theta[worst] >= 0:
                return theta[0], theta[1], theta[2]
            kept.remove(worst)
        return 0.0, 0.0, 0.0

    def _solve_for(self, kept: list[int]) -> list[float]:
        """Gaussian elimination on the kept rows; the matrix is positive definite, so no pivoting."""
        rows = [
            [self._information[i][j] + HOLD * (i == j) for j in kept]
            + [self._moment[i] + HOLD * self._theta[i]]
            for i in kept
        ]
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
