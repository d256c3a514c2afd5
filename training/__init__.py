"""Training: demo models and adapters, the maze environment, rollouts, the learner and its publisher."""
