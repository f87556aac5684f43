"""One covered layer at a time, once per job: prefetched, decomposed, clipped and recorded."""
