"""K-FAC and EK-FAC by layers: factors as they are multiplied, their eigenbases, and the layers that are read."""
