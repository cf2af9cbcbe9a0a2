"""A job with a deadline on recorded spot machines: ours, published policies, and an optimum that knows the future."""
