"""The devices that this worker offers, and which of them failed."""
