"""Exports: factors in the files of other tools, a module for each."""
