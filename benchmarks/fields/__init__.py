"""What the comparison of trained networks is made of: data, networks, training and metrics."""
