"""The refusal of sizes, names or data that few-shot training cannot take."""

from engine.errors import UsageError


class FewShotRefused(UsageError, ValueError):
    """A size, a name or an image does not fit; the message names both numbers and says what would do."""

    code = "few_shot_refused"
