"""Webhooks: changes of jobs' states are written as deliveries, and sent by a process of its own."""
