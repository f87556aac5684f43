"""Claims, fencing tokens, the reaper of expired leases, and wake-ups."""
