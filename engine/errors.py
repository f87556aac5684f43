"""Errors of the mathematics, sorted by who must act.

::

    EngineError
    ├── UsageError               the caller mends the model, the data or the options
    │   ├── NonFiniteModel       a weight holds NaN or Inf
    │   ├── NonFiniteLoss        outputs of a batch hold NaN or Inf
    │   ├── NonFiniteFactor      a layer's factor holds NaN or Inf
    │   ├── EmptyData            no example, or no loss term, arrived
    │   ├── DataDiffer           a later pass over the data saw other examples than the first
    │   ├── WrongShape           outputs and targets do not fit each other, or the task
    │   ├── NoLikelihood         the model's own loss has no distribution to take a Fisher of
    │   ├── ModelRefused         the model raised on a batch
    │   ├── ModelChanged         a forward pass writes to a parameter, replaces or adds one
    │   ├── NothingToAnalyse     no trainable parameter in a treated layer
    │   ├── CoverageTooLow       less is covered than `collection.min_coverage` asks
    │   ├── BiasColumnMismatch   a factor or gradient disagrees with its layer about the bias column
    │   ├── NoSuchLayer          an option names a layer that the model does not have, or that has no such number
    │   ├── NoConditionNumber    clipping is asked for, and `stabilisation.kappa_max` is null
    │   ├── BeyondSolvers        EK-FAC is asked for, and a factor has more rows than eigensolvers take
    │   ├── BrokenFactors        stored factors do not read as written
    │   ├── NotMergeable         sets of factors cannot be merged exactly
    │   ├── RanksRefused         an option is asked for that cannot be measured exactly by several ranks
    │   ├── FewShotRefused       sizes, names or data that few-shot training cannot take
    │   ├── TrainingRefused      options, a model or a loss that training in a notebook cannot have
    │   └── BudgetExceeded       the plan does not fit the budget; nothing was allocated
    │       └── OutOfMemory      memory ran out although the plan fitted, with every fallback down to the last
    ├── RankFailed               another rank of the job failed, or is gone; it carries that rank's category
    ├── RankTimedOut             another rank showed no sign of life (transient)
    ├── CoverageBroken           covered and declared do not add up to trainable (fatal: a fault of ours)
    └── NotConverged             every eigensolver failed (fatal: the operator)

An ``Unwinding`` is not an error: it leaves nested calls, the user's model included, for a reason of ours.
"""

from typing import ClassVar, Literal

Category = Literal["usage", "transient", "fatal"]


class EngineError(Exception):
    """A failure with its category, a stable code, and the layer or document field it concerns."""

    category: ClassVar[Category] = "fatal"
    code: ClassVar[str] = "engine_error"

    def __init__(self, message: str, *, layer: str | None = None, pointer: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.layer = layer
        self.pointer = pointer


class UsageError(EngineError):
    """The caller can mend it."""

    category = "usage"
    code = "usage"


class NonFiniteModel(UsageError):
    """A weight holds NaN or Inf."""

    code = "non_finite_model"


class NonFiniteLoss(UsageError):
    """The model's outputs hold NaN or Inf."""

    code = "non_finite_loss"


class NonFiniteFactor(UsageError):
    """A layer's statistics hold NaN or Inf."""

    code = "non_finite_factor"


class EmptyData(UsageError):
    """There is nothing to average over."""

    code = "empty_data"


class DataDiffer(UsageError):
    """A pass over the data saw other examples than the one before; the message has both figures."""

    code = "data_differ"


class WrongShape(UsageError):
    """Two shapes contradict each other; the message names both."""

    code = "wrong_shape"


class NoLikelihood(UsageError):
    """The model's own loss was asked for more than its gradient."""

    code = "no_likelihood"


class ModelRefused(UsageError):
    """The model raised on a batch of this data."""

    code = "model_refused"
    examples: tuple[int, ...] | None = None
    """Numbers of the examples in the data; None where they do not matter."""


class ModelChanged(UsageError):
    """A parameter moved while the model was measured."""

    code = "model_changed"


class NothingToAnalyse(UsageError):
    """No layer is covered."""

    code = "nothing_to_analyse"


class CoverageTooLow(UsageError):
    """A smaller share is covered than the caller asks for."""

    code = "coverage_too_low"


class BiasColumnMismatch(UsageError):
    """A factor or gradient has a bias column where its layer has none, or lacks it."""

    code = "bias_column_mismatch"


class NoSuchLayer(UsageError):
    """An option names a layer that cannot be had."""

    code = "no_such_layer"


class NoConditionNumber(UsageError):
    """There is no condition number to clip at."""

    code = "no_condition_number"


class BeyondSolvers(UsageError):
    """Eigenvectors are asked for of a factor that no eigensolver takes."""

    code = "beyond_solvers"


class BrokenFactors(UsageError):
    """Stored factors are missing, torn or of another layout."""

    code = "broken_factors"


class NotMergeable(UsageError):
    """Sets of factors are not sums over disjoint examples of one collection."""

    code = "not_mergeable"


class FewShotRefused(UsageError, ValueError):
    """A size, a name or an image does not fit; the message names both numbers and says what would do."""

    code = "few_shot_refused"


class TrainingRefused(UsageError, ValueError):
    """An option, a model or a loss that would not give the gradient that was asked for."""

    code = "training_refused"


class BudgetExceeded(UsageError):
    """The plan's peak exceeds the budget."""

    code = "budget_exceeded"


class OutOfMemory(BudgetExceeded):
    """Memory ran out where the plan had foreseen that it suffices, and no lower rung was left."""

    code = "out_of_memory"


class RanksRefused(UsageError):
    """Several ranks cannot measure exactly what is asked for."""

    code = "ranks_refused"


class RankFailed(EngineError):
    """Another rank failed, and this one ends with it."""

    code = "rank_failed"

    def __init__(
        self,
        message: str,
        *,
        category: Category = "transient",
        layer: str | None = None,
        pointer: str | None = None,
    ) -> None:
        super().__init__(message, layer=layer, pointer=pointer)
        self.category = category  # type: ignore[misc]


class RankTimedOut(EngineError):
    """Another rank did not come in time."""

    category = "transient"
    code = "rank_timed_out"


class CoverageBroken(EngineError):
    """A trainable number is counted twice, or not at all."""

    code = "coverage_broken"


class NotConverged(EngineError):
    """None of the eigendecomposition's fallbacks gave finite eigenvalues."""

    code = "not_converged"


class Unwinding(Exception):
    """Not an error: work is left on purpose."""


class StopRequested(Unwinding):
    """The job was asked to stop and has reached a checkpoint."""
