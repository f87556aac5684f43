"""Claims, fencing tokens, the reaper of expired leases, and the outbox of wake-ups."""
