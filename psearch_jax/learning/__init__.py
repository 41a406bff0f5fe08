"""How the policy changes: advantages, losses, batches, update, supervised stage."""
