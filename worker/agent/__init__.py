"""Taking jobs: registration, the claim loop and the maintenance thread of one worker."""
