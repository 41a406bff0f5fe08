"""How an episode is played: protocol, episode, environment, sampling, engine."""
