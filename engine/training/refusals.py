"""The refusal of options that training cannot have."""

from engine.errors import UsageError


class TrainingRefused(UsageError, ValueError):
    """An option, a model or a loss that would not give the gradient that was asked for."""

    code = "training_refused"
