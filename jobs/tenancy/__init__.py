"""API keys, tenants and their quotas."""
