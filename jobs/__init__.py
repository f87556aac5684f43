"""The ledger: who owns a job, what it has written, and in which order. SQL only; it knows no torch.

In its functions an `engine` is the ledger's database, a `connection` has an open transaction, a `claim` is the one
under which the caller writes, a `fence` names an attempt by its fencing token, and `tenant_id` is the tenant who asks.
"""
