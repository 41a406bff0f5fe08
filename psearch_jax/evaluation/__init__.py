"""How policies are compared: metrics, baselines and the report."""
