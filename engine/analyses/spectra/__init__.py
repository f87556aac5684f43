"""Spectra of K-FAC, of EK-FAC and of the curvatures that are known by their products, on one lattice of log10 |λ|."""
