"""The uses of parameters by the operations of a forward pass, where no module's call shows them."""
