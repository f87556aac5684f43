"""Few-shot learning: backbones, heads, the variance and covariance penalties, episodes and drawn images."""
