"""How ranks are started, and what they print and report."""
