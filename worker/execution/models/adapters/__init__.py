"""Adapters: small trained matrices that are applied to a checkpoint's model."""
