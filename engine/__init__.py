"""The mathematics: curvature of a torch model, with no service in sight (torch and catalog only)."""
