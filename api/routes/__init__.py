"""The REST interface: one module per resource.

The docstring of a handler is the description of its route in the OpenAPI document, which says what is returned;
parameters and errors are described by their own entries there, so the docstrings have no sections.
"""
