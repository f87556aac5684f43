"""The state of a model: the numbers and objects that it holds, and how they are put back."""
