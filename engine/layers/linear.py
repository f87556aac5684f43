"""Linear layers: ``nn.Linear`` and the ``Conv1D`` of Hugging Face's GPT-2, which holds Wᵀ."""

from dataclasses import dataclass

from torch import Tensor, nn

from engine.layers.layer import TreatedLayer


@dataclass(eq=False)
class LinearLayer(TreatedLayer):
    """``y = W a + b`` on the last dimension; every leading dimension is a position."""

    @property
    def fan_in(self) -> int:
        """Input features."""
        return int(self.module.in_features)  # type: ignore[arg-type]

    @property
    def fan_out(self) -> int:
        """Output features."""
        return int(self.module.out_features)  # type: ignore[arg-type]

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Read the features of every position.

        Args:
            entered: The module's input, shape (…, d_in).

        Returns:
            A view where the input is contiguous, shape (P, d_in).
        """
        # a width of zero leaves -1 open
        return entered.reshape(entered.shape[:-1].numel(), entered.shape[-1])

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Read the output gradient of every position.

        Args:
            gradient: Gradient of the module's output, shape (…, d_out).

        Returns:
            A view where the gradient is contiguous, shape (P, d_out).
        """
        return gradient.reshape(-1, gradient.shape[-1])


@dataclass(eq=False)
class TransposedLinearLayer(LinearLayer):
    """``y = a W + b`` with W stored (d_in, d_out): the convention is met by its transpose."""

    @property
    def fan_in(self) -> int:
        """Rows of the stored weight."""
        return int(self.module.weight.shape[0])  # type: ignore[index]

    @property
    def fan_out(self) -> int:
        """Columns of the stored weight."""
        return int(self.module.weight.shape[1])  # type: ignore[index]

    def as_stored(self, weight: Tensor) -> Tensor:
        """Transpose, since the weight is stored (d_in, d_out).

        Args:
            weight: In row-vector convention, shape (1, d_out, d_in).

        Returns:
            A view, shape (d_in, d_out).
        """
        return weight[0].T


def treats_linear(module: nn.Module) -> str | None:
    """Tell why a linear layer cannot be treated."""
    # a subclass that overrides forward (an adapter, say) computes something else
    return None if type(module).forward is nn.Linear.forward else "overridden_forward"


def is_transposed_linear(module: nn.Module) -> bool:
    """Tell whether a module is Hugging Face's ``Conv1D``, by its name, so that transformers is not imported."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")
