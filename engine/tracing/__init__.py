"""Which operations of a forward pass use which parameter, where no module says so."""
