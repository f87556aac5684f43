"""Tensors in, tensors out: eigensolvers, Lanczos, spectra of Kronecker products, products in panels."""
